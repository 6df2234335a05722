"""`past_key_values`: the cache object that a call continues from, and the one that it fills.

Rows know no padding and a cache object is a rectangle, so each position of a row has a place in it.
`cache_implementation` names the kind of a new one, `cache_config` says how numbers are quantised,
and `max_cache_len` is the least room of a static one. What does not fit, or what a kind cannot do,
is refused here, before any compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from everystep.cache.cache_config import read_quantization, refuse_quantized_windows
from everystep.cache.containers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
    own_half,
)
from everystep.cache.formats import Quantization
from everystep.cache.layers import QuantizedLayer
from everystep.cache.legacy import read_legacy
from everystep.cache.pasts import across_of, kv_of, past_of
from everystep.config import Effective
from everystep.config.fields import OLD_CACHES
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.nn.network import State, holds_states
from everystep.requests.arrays import has_holes
from everystep.requests.door import PromptValues
from everystep.requests.inputs import Inputs, behind
from everystep.requests.pictures import shift_of
from everystep.requests.subject import Subject
from everystep.types import Group, Prompt

_OFFLOADED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")
_STAYS = "rows stay where the model computes", "Use 'dynamic', or 'quantized' to save memory"
_ABSENT = {  # why, and what to do
    **dict.fromkeys(_OFFLOADED, _STAYS),
    "paged": (
        "a call of one rectangle has none",
        "Call everystep.generate(model, tokenizer, prompts), whose rows share their memory",
    ),
}


# --- the one that is passed -----------------------------------------------------------------------


def read_cache(past: object, effective: Effective, model: Subject) -> Cache:
    """Return the cache object that was passed, checked against the model and the configuration; a
    new one that holds what tuples say."""
    cache = model.core.own_cache(past)
    if isinstance(cache, (tuple, list)) and not holds_states(model.core.network.stores):
        cache = read_legacy(cache, model.windows, across=model.is_encoder_decoder)
    cache = require_cache(cache, model)
    if effective.use_cache is False:
        _refuse("contradicts use_cache=False", "one of the two", "both", "Leave one of them out")
    if "cache_implementation" in effective.caller:
        got = f"cache_implementation={effective.cache_implementation!r} too"
        _refuse("is the cache already", "one of the two", got, "Leave cache_implementation out")
    return cache


def require_cache(cache: object, model: Subject) -> Cache:
    """Return the object, which is a cache that this model can go on from."""
    if holds_states(model.core.network.stores):
        do = "Pass the whole prompt as input_ids"
        _refuse("is for models of attention", "none", type(cache).__name__, do)
    wanted = EncoderDecoderCache if model.is_encoder_decoder else Cache
    if not isinstance(cache, wanted):
        do = "Pass the cache of an earlier result, or convert tuples with from_legacy_cache"
        home, name = type(cache).__module__.partition(".")[0], type(cache).__name__
        got = name if home in ("builtins", "everystep") else f"{home}'s {name}"
        _refuse("is not a cache of this library", wanted.__name__, got, do)
    if isinstance(cache, EncoderDecoderCache) and not model.is_encoder_decoder:
        do = "Pass its self_attention_cache"
        _refuse("is of a model with an encoder", "a plain cache", type(cache).__name__, do)
    _require_shape(cache, model)
    return cache


def hide_past(prompt: PromptValues, cache: Cache) -> tuple[PromptValues, Tensor | None]:
    """Return what is read as the prompt, and which cached positions are real where it does not say
    so.

    As in transformers, ids (or embeddings) are the whole sequence if the attention mask is as wide
    as they are, and only the new part if the mask is as wide as the cache and they together.
    """
    length = int(cache.get_seq_length())
    first = "input_ids" if prompt.inputs_embeds is None else "inputs_embeds"
    content = prompt.input_ids if prompt.inputs_embeds is None else prompt.inputs_embeds
    if length == 0 or content is None:
        return prompt, None
    width = torch.as_tensor(content).shape[1]
    mask = None if prompt.attention_mask is None else torch.as_tensor(prompt.attention_mask)
    seen = width if mask is None else mask.shape[-1]
    if mask is not None and seen != width and mask.dim() > 2:
        do = "Pass the whole sequence with it"
        _refuse("does not go with a 4-D mask of new positions alone", "(batch, length)", seen, do)
    if seen == width > length:
        return prompt, None
    if mask is None or seen != length + width:
        _refuse(
            "does not fit the prompt",
            f"{first} longer than {length} positions, or an attention_mask of {length + width}",
            f"{first} of {width} and {'no mask' if mask is None else f'a mask of {seen}'}",
            "Pass the whole sequence, or only what is new with a mask over all of it",
        )
    mask = mask.bool()
    new = replace(prompt, attention_mask=mask[:, length:].long())
    if prompt.position_ids is None and has_holes(mask[:, length:]):
        # Real positions count, those in the cache among them.
        new = replace(new, position_ids=(mask.long().cumsum(-1) - 1).clamp(min=0)[:, length:])
    return new, mask[:, :length]


def with_seen(inputs: Inputs, seen: Tensor) -> Inputs:
    """Return the inputs after the cached positions of which `seen` (B, S) are real."""
    if len(seen) != inputs.batch:
        _refuse("differs from the prompt in rows", inputs.batch, len(seen))
    real = tuple(np.flatnonzero(row) for row in seen.cpu().numpy())
    pairs = zip(inputs.prompts, real, strict=True)
    prompts = tuple(replace(prompt, before=len(places)) for prompt, places in pairs)
    return replace(inputs, prompts=prompts, lead=seen.shape[1], seen=real)


def continued(inputs: Inputs, cache: Cache, width: int, *, hidden: bool) -> Inputs:
    """Return every prompt with the part of the cache that is its past; `width`: sequences per
    prompt. If `hidden` states are read, which no cache holds, prompts are fed again from their
    ids."""
    length = int(cache.get_seq_length())
    if length == 0:
        return inputs
    if hidden and inputs.lead:
        _refuse("lacks hidden states, for penalty_alpha", "ids of all positions", "the last ones")
    kv = _one_of_each(_rectangle(cache, length), inputs.batch, width)
    link = _after if inputs.lead else _known
    _require_held(inputs, cache)
    if hidden:
        return inputs
    rows = range(inputs.batch)
    return replace(inputs, prompts=tuple(link(inputs, row, kv[:, :, row]) for row in rows))


def require_possible(
    cache: Cache, positions: int, *, drafts: bool, heals: bool, prompt_logprobs: bool
) -> None:
    """Raise if a call needs more than a cache that was passed can give.

    `positions`: how many of a row are cached in the end, at most.
    """
    if heals:
        do = "Leave token_healing out"
        _refuse("does not go with token_healing", "one of the two", "both", do)
    _require_abilities(cache, positions, drafts, "past_key_values")
    if prompt_logprobs:
        _refuse("hides logits of the prompt", "none, for prompt_logprobs", "both")


def require_room(cache: Cache, needed: int) -> None:
    """Raise if so many positions do not fit into the cache."""
    rooms = [layer.get_max_length() for layer in cache.layers if not layer.is_sliding]
    if rooms and min(rooms) < needed:
        do = "Make it with a larger max_cache_len, or ask for fewer tokens"
        _refuse("is too small", f"room for {needed} positions", f"max_cache_len={min(rooms)}", do)


def _require_abilities(cache: Cache, positions: int, drafts: bool, name: str) -> None:
    """Raise if a call needs more than the cache, which the argument `name` chose, can do."""
    if drafts and not cache.is_croppable:
        raise RequestError(
            f"{name} cannot be truncated",
            wanted="a cache that can be: drafts may be rejected",
            got=type(cache).__name__,
            do="Choose a DynamicCache, or leave the drafts out",
        )
    if "grow" not in cache.abilities:
        require_room(cache, positions)


def _require_held(inputs: Inputs, cache: Cache) -> None:
    """Raise if a prompt calls a position real where the call that filled the cache left padding.

    Of other caches that is not known: the keys of a real token may be 0.
    """
    own = own_half(cache)
    if own.pads is None or len(own.pads) != own.batch_size:
        return
    for row, pads in enumerate(own.pads[:: own.batch_size // inputs.batch].tolist()):
        real = inputs.seen[row] if inputs.seen else inputs.margins[row : row + 1]
        first = int(real[0]) if len(real) else pads
        if first < pads:
            _refuse(
                f"has padding where the prompt has none in row {row}",
                "an attention_mask with padding on the left, as in the sequences of the result",
                f"position {first} called real",
                "Pass those sequences and a mask of theirs",
            )


def _require_shape(cache: Cache, model: Subject) -> None:
    stores = model.core.network.stores
    own = own_half(cache)
    if own.layer_class_to_replicate is None and len(own) != len(stores):
        _refuse("is of another model", f"{len(stores)} layers", f"{len(own)} layers")
    lengths = {int(layer.get_seq_length()) for layer in own.layers}
    if len(lengths) > 1:
        _refuse("is not the same in all layers", "one length", sorted(lengths))
    if lengths in ({0}, set()):
        return
    for layer, (store, *_) in zip(own.layers, stores, strict=True):
        keys, values = layer.keys, layer.values
        if keys is None or values is None or isinstance(store, State):
            raise RequestError("a layer of past_key_values is empty", do="Fill all or none")
        got = (keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device.type)
        sizes = (store.heads, store.key_dim, store.value_dim)
        wanted = (*sizes, model.core.dtype, model.device.type)
        if got != wanted or keys.shape[:3] != values.shape[:3]:
            what = "(heads, size of keys, of values, type, device)"
            _refuse("is of another model", f"{what} {wanted}", got)


def _rectangle(cache: Cache, length: int) -> Tensor:
    """Return (L, 2, R, K, length, D); what a window has dropped is 0, as it is not looked at
    again."""
    stacked = [torch.stack(layer.whole()) for layer in cache.layers]
    filled = [torch.nn.functional.pad(x, (0, 0, length - x.shape[3], 0)) for x in stacked]
    return torch.stack(filled)


def _one_of_each(kv: Tensor, batch: int, width: int) -> Tensor:
    """Return (L, 2, B, ...): one row per prompt; `width` equal ones may stand for each."""
    rows = kv.shape[2]
    if rows == batch:
        return kv
    first = kv[:, :, ::width]
    if rows != batch * width or not torch.equal(first.repeat_interleave(width, dim=2), kv):
        do = "Choose rows with batch_select_indices"
        _refuse("differs from the prompt in rows", f"{batch}, one per row of the prompt", rows, do)
    return first


def _known(inputs: Inputs, row: int, kv: Tensor) -> Prompt:
    """Return the prompt of all positions, of which the first are cached in kv (L, 2, K, S, D)."""
    prompt, first = inputs.prompts[row], inputs.margins[row]
    count = max(0, kv.shape[3] - first)
    if count >= prompt.length:
        do = "Pass the whole sequence, new tokens included"
        what = f"leaves nothing to feed in row {row}"
        _refuse(what, f"more than {count} positions", prompt.length, do)
    return replace(prompt, past=past_of(kv[..., first:, :]) if count else None)


def _after(inputs: Inputs, row: int, kv: Tensor) -> Prompt:
    """Return the prompt of what comes after the real positions of kv (L, 2, K, S, D)."""
    prompt, count = inputs.prompts[row], inputs.prompts[row].before
    past = past_of(kv[..., inputs.seen[row], :]) if count else None
    return replace(behind(prompt, count, inputs.per_token), past=past)


# --- the one that is filled -----------------------------------------------------------------------


def row_quantization(
    effective: Effective, model: Subject, passed: Cache | None = None
) -> Quantization | None:
    """Return how rows keep what they hold: as the cache that was passed does, or as the
    configuration says; None for full precision."""
    if passed is not None:
        own = own_half(passed)
        layer = own.layers[0] if own.layers else None
        return layer.quantization if isinstance(layer, QuantizedLayer) else None
    if effective.use_cache is False or effective.cache_implementation is None:
        return None
    kind = _kind(effective)
    if kind != "dynamic" and holds_states(model.core.network.stores):
        raise UnsupportedError(
            "rows of a model with recurrent layers hold states, not keys and values",
            got=f"cache_implementation={kind!r}",
            do="Leave cache_implementation out",
        )
    if kind != "quantized":
        return None
    refuse_quantized_windows(model.windows)
    return read_quantization(effective.cache_config or {})


def new_cache(
    effective: Effective, inputs: Inputs, model: Subject, positions: int, *, drafts: bool
) -> Cache | None:
    """Return an empty cache of the kind that the configuration names, which can do what a call
    needs; None where the call goes without, or where no object holds what rows do. `positions`: how
    many are cached in the end, at most."""
    if effective.use_cache is False:
        return None
    kind, windows = _kind(effective), list(model.windows)
    how = row_quantization(effective, model)
    if holds_states(model.core.network.stores):
        return None
    cache: Cache
    if how is not None:
        cache = QuantizedCache("everystep", windows, how.bits, None, None, how.group, how.residual)
    elif kind == "dynamic":
        cache = DynamicCache(config=windows)
    else:
        cache = StaticCache(windows, max(positions, effective.max_cache_len or 0))
    if inputs.source is not None:
        read = max((int(places[-1]) + 1 for places in inputs.source.places), default=0)
        fixed = kind not in ("dynamic", "quantized") and read > 0
        across = StaticCache([None] * len(windows), read) if fixed else DynamicCache()
        cache = EncoderDecoderCache(cache, across)
    _require_abilities(cache, positions, drafts, f"cache_implementation={kind!r}")
    return cache


def _kind(effective: Effective) -> str:
    """Return "dynamic", "static" or "quantized"; UnsupportedError for what the caller cannot
    have."""
    kind = effective.cache_implementation
    # As in transformers, which once had a static cache of this name for what grows with a window.
    if kind in (None, "hybrid"):
        return "dynamic"
    if kind not in _ABSENT:
        return "static" if kind in OLD_CACHES else str(kind)
    if effective.source("cache_implementation") != "checkpoint":
        why, do = _ABSENT[kind]
        what = f"cache_implementation asks for a kind of cache that is not there: {why}"
        raise UnsupportedError(what, got=shown(kind), do=do)
    # The tokens are the same, and the caller did not ask.
    return "dynamic"


def fill_cache(cache: Cache | None, inputs: Inputs, groups: list[Group]) -> Cache | None:
    """Return the cache, which now holds what the rows hold in the end; None if there is none to
    fill, or the strategy leaves no rows."""
    pasts = [past for group in groups for past in group.pasts]
    if cache is None or not pasts:
        return None
    prompt_of = [row for row, group in enumerate(groups) for _ in group.pasts]
    pairs = list(zip(prompt_of, pasts, strict=True))
    places = [_row_places(inputs, row, past.length) for row, past in pairs]
    own = own_half(cache)
    _fill(own, _placed([*map(kv_of, pasts)], places))
    own.pads = torch.tensor([int(place[0]) for place in places])
    own.shifts = torch.tensor([shift_of(inputs.prompts[row]) for row in prompt_of])
    if isinstance(cache, EncoderDecoderCache) and inputs.source is not None:
        read = [inputs.source.places[row] for row in prompt_of]
        across = [kv for kv in map(across_of, pasts) if kv is not None]
        _fill(cache.cross_attention_cache, _placed(across, read))
        cache.is_updated = dict.fromkeys(range(len(cache)), True)
    return cache


def _row_places(inputs: Inputs, row: int, length: int) -> np.ndarray:
    """Return (length,) where the positions of a row stand: its prompt's places, then one after
    another."""
    prompt = inputs.places(row)
    return np.concatenate([prompt, inputs.total_width + np.arange(length - len(prompt))])


def _placed(rows: list[Tensor], places: list[np.ndarray]) -> Tensor:
    """Return R times (L, 2, K, n, D) in their places: (L, 2, R, K, T, D), 0 where nothing
    stands."""
    width = 1 + max(int(own[-1]) for own in places)
    layers, two, heads, _, dim = rows[0].shape
    out = rows[0].new_zeros(layers, two, len(rows), heads, width, dim)
    for index, (row, own) in enumerate(zip(rows, places, strict=True)):
        out[:, :, index, :, torch.from_numpy(own).to(out.device)] = row
    return out


def _fill(cache: Cache, kv: Tensor) -> None:
    """Have the cache hold (L, 2, R, K, T, D) and nothing else."""
    other = cache.batch_size not in (-1, kv.shape[2])
    cache.reset()
    for index, (keys, values) in enumerate(kv):
        if other:
            cache.layers[index].keys = cache.layers[index].values = None
        cache.update(keys, values, index)


def _refuse(what: str, wanted: object, got: object, do: str | None = None) -> NoReturn:
    raise RequestError(f"past_key_values {what}", wanted=wanted, got=got, do=do)
