"""`Prefix`: positions that were fed once, from which any number of calls go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from everystep.cache.containers import Cache
from everystep.errors import RequestError, shown
from everystep.requests.door import PromptValues
from everystep.requests.inputs import Inputs
from everystep.requests.options import Options, Prefix, adapters_of
from everystep.requests.subject import Subject
from everystep.types import EncoderSource, InputSpec, Prompt

_AFTER = (
    *("decoder_input_ids", "decoder_attention_mask", "assistant_encoder_outputs"),
    *("negative_prompt_ids", "negative_prompt_attention_mask", "past_key_values"),
)
"""What a call may bring after a prefix that knows its source."""


def read_prefix(given: object) -> Prefix | None:
    """Return what was passed as `prefix`; RequestError if it is something else."""
    if given is None or isinstance(given, Prefix):
        return given
    do = "Make it with everystep.prefill(model, tokenizer, prompt)"
    raise RequestError("prefix is of another kind", wanted="a Prefix", got=shown(given), do=do)


def source_of(prefix: Prefix, model: Subject, given: PromptValues) -> EncoderSource:
    """Return what the encoder of the model has read of a prefix.

    RequestError for a prefix of another model, and for a call that brings a source too.
    """
    if prefix.core != model.core or prefix.source is None:
        _refuse_other_model()
    if others := [name for name in given.passed() if name not in _AFTER]:
        raise RequestError(
            "prefix knows what the encoder has read, and the call brings another source",
            wanted="decoder_input_ids, or nothing, beside the prefix",
            got=", ".join(others),
            do=f"Leave {' and '.join(others)} out, or make a prefix of that with everystep.prefill",
        )
    return prefix.source


def after_prefix(
    prefix: Prefix,
    model: Subject,
    inputs: Inputs,
    options: Options,
    passed: Cache | None = None,
) -> Inputs:
    """Return the inputs with every prompt after the prefix; RequestError for a call that cannot go
    on from it. `passed`: the cache that the call brings.

    Where the prefix and what follows are ids, the prompt is all of them; otherwise the positions of
    the prefix have no ids.
    """
    _require_fitting(prefix, model, inputs, options, passed)
    count, head, declared = len(prefix), prefix.ids, model.inputs
    only_ids = all(one.embeds is None and one.ids is not None for one in inputs.prompts)
    if head is not None and only_ids:
        prompts = tuple(
            replace(_moved(prompt, prefix, declared), ids=np.concatenate([head, prompt.ids]))
            for prompt in inputs.prompts
        )
        return replace(inputs, prompts=prompts, width=inputs.width + count)
    prompts = tuple(
        replace(_moved(prompt, prefix, declared), before=count) for prompt in inputs.prompts
    )
    seen = (np.arange(count),) * inputs.batch
    return replace(inputs, prompts=prompts, lead=count, seen=seen)


def _moved(prompt: Prompt, prefix: Prefix, declared: Mapping[str, InputSpec]) -> Prompt:
    """Return the prompt with the past of the prefix, and what it is given at its places after
    it."""
    count, own, beyond = len(prefix), prompt.positions, prompt.beyond
    if beyond is None and prefix.prompt.beyond is not None and own is None:
        beyond = prefix.prompt.beyond + prompt.length
    first = prefix.prompt.positions
    if first is not None or own is not None:
        if first is None:
            first = torch.arange(count)
        if own is None:
            own = prefix.prompt.follows + torch.arange(prompt.length)
        axes = max(first.shape[:-1], own.shape[:-1], key=len)
        first, own = first.expand(*axes, -1), own.expand(*axes, -1)
        own = torch.cat([first, own], dim=-1)
    inputs = {
        name: values for name, values in prefix.prompt.inputs.items() if declared[name].per == "row"
    }
    for name, values in prompt.inputs.items():
        # What was fed is not given again.
        fed = values.new_zeros(count, *values.shape[1:]) if values.dim() else values
        inputs[name] = torch.cat([fed, values]) if declared[name].per == "token" else values
    return replace(prompt, positions=own, inputs=inputs, past=prefix.past, beyond=beyond)


def _require_fitting(
    prefix: Prefix, model: Subject, inputs: Inputs, options: Options, passed: Cache | None
) -> None:
    e = options.effective
    if prefix.core != model.core:
        _refuse_other_model()
    if prefix.changes != options.weight_changes:
        _refuse(
            "was fed to weights of before",
            "the weights that it was fed to",
            "changed ones",
            "Make it anew after the weights have changed",
        )
    asked = adapters_of(options.adapters, inputs.batch)
    held = prefix.adapters, prefix.resolved
    if any((own, options.resolved_of(own)) != held for own in asked):
        got = shown(options.adapters)
        do = "Make one for each adapter, with the same adapters, and anew after these have changed"
        _refuse("was fed with other adapters", [name for name, _ in prefix.adapters], got, do)
    if inputs.lead or (passed is not None and int(passed.get_seq_length())):
        _refuse("and past_key_values both say what comes first", "one of the two", "both")
    starts = {*options.ends.starts} if "decoder_start_token_id" in e.caller else set[int]()
    if model.is_encoder_decoder and prefix.ids and starts - {prefix.ids[0]}:
        do = "Leave decoder_start_token_id out, or make a prefix that begins with it"
        _refuse("has begun the decoder's row", prefix.ids[0], e.decoder_start_token_id, do)
    if e.use_cache is False:
        _refuse("contradicts use_cache=False", "one of the two", "both")
    if any(prompt.mask is not None for prompt in inputs.prompts):
        do = "Leave out the positions that nothing is to see"
        _refuse("does not go with holes after it", "positions that all see", "a mask", do)
    if e.token_healing:
        _refuse("does not go with token_healing", "one of the two", "both")
    if prefix.past is None:
        return  # nothing of the decoder's is held
    if options.recording.prompt_logprobs is not None:
        _refuse("hides logits of the prompt", "none, for prompt_logprobs", "both")
    if e.cache_implementation == "quantized":
        _refuse("is in full precision", "no quantised cache", "cache_implementation='quantized'")


def refuse_unseen_states() -> NoReturn:
    """Raise RequestError: a strategy reads hidden states of positions that are not fed again."""
    _refuse("lacks hidden states", "none, for penalty_alpha", "both")


def require_whole(prompt: Prompt) -> None:
    """Raise RequestError if what follows a prompt could not know what it may see."""
    if prompt.mask is not None:
        do = "Leave out the positions that nothing is to see"
        raise RequestError(
            "a prefix cannot have a mask", wanted="positions that all see", got="a mask", do=do
        )


def rest_of(ids: Tensor, prefix: Prefix | None) -> Tensor:
    """Return (n,) the ids of a whole conversation after the prefix that it begins with."""
    if prefix is None:
        return ids
    if prefix.ids is None:
        do = "Pass the text or the ids that follow it"
        _refuse("has no ids that messages could begin with", "a prefix of ids", "embeddings", do)
    head, count = torch.tensor(prefix.ids), len(prefix)
    agree = (ids[:count] == head[: len(ids)]).long().cumprod(0).sum()
    if int(agree) < count or len(ids) == count:
        do = "Make it from the first messages of this conversation"
        got = f"{len(ids)} ids, of which the first {int(agree)} agree"
        _refuse("is not the beginning of these messages", f"its {count} ids and more", got, do)
    return ids[count:]


def _refuse_other_model() -> NoReturn:
    do = "Make it anew with this model, and after model.to() or a change of its weights"
    _refuse("is of another model", "the model that it was made with", "another", do)


def _refuse(what: str, wanted: object, got: object, do: str = "Leave one of them out") -> NoReturn:
    raise RequestError(f"prefix {what}", wanted=wanted, got=got, do=do)
