"""What a called model reads of its arguments: positions, its cache, an encoder's states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everystep.api.caches import is_recurrent, require_cache, require_room
from everystep.cache.containers import Cache, DynamicCache, EncoderDecoderCache
from everystep.config.kinds import is_integer
from everystep.errors import RequestError, UnsupportedError
from everystep.outputs import encoder_states

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel


def kept_positions(wanted: object, inputs: Tensor | None) -> slice | Tensor:
    """Of which positions of the inputs (B, T, ...) logits are given: the last `wanted` of them, all
    for 0, or those that a tensor (n,) names; RequestError for anything else."""
    length = inputs.shape[1] if inputs is not None and inputs.dim() > 1 else 0
    if is_integer(wanted) and wanted >= 0:  # type: ignore[operator]
        return slice(-wanted, None)  # type: ignore[operator]
    if isinstance(wanted, Tensor) and wanted.dtype in (torch.int64, torch.int32):
        inside = (wanted >= -length) & (wanted < length)
        if wanted.dim() == 1 and bool(inside.all()):
            return wanted
    raise RequestError(
        "logits_to_keep names no positions of the inputs",
        wanted=f"an integer of at least 0, or a 1-D tensor of integers below {length}",
        got=repr(wanted),
        do="Leave it out for the logits of every position",
    )


def states_in_place(given: object, *read: Tensor | None) -> Tensor | None:
    """(B, S, E) the caller's encoder states, None without; RequestError beside what an encoder
    would read."""
    if given is None:
        return None
    if any(one is not None for one in read):
        what = "encoder_outputs and a prompt for the encoder were both given"
        raise RequestError(what, do="Leave what the encoder would read out")
    return encoder_states(given)


def cache_of_forward(
    model: LanguageModel, inputs: Tensor | None, passed: object, use_cache: bool | None
) -> Cache | None:
    """The cache that a forward of `inputs` (B, T, ...), a decoder's, adds to; None if it keeps
    nothing.

    As in the reference a passed one is filled whatever `use_cache` says, and without it the
    model's configuration decides.
    """
    recurrent = is_recurrent(model)
    if use_cache is None:
        use_cache = bool(getattr(model.config, "use_cache", True)) and not recurrent
    if passed is None and not use_cache:
        return None
    if passed is None:
        if recurrent:
            raise UnsupportedError(
                "a model with recurrent layers keeps no cache object",
                got="use_cache=True",
                do="Leave it out and pass all input_ids each time, or call generate",
            )
        made = DynamicCache(config=list(model.windows))
        return EncoderDecoderCache(made, DynamicCache()) if model.is_encoder_decoder else made
    cache = require_cache(passed, model)
    if inputs is not None and inputs.dim() > 1:
        batch, length = inputs.shape[:2]
        if cache.batch_size not in (-1, batch):
            what, do = "past_key_values differs from the inputs in rows", "batch_select_indices"
            raise RequestError(
                what, wanted=batch, got=cache.batch_size, do=f"Choose rows with {do}"
            )
        if "grow" not in cache.abilities:
            require_room(cache, int(cache.get_seq_length()) + length)
    return cache
