"""`generate` over a rectangle: transformers' call, answered by the engine in lockstep."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.cache.containers import Cache
from everystep.config.kinds import FLAG
from everystep.drivers.complete import completed
from everystep.drivers.custom import Loop, refuse_unseen, run_loop
from everystep.drivers.driver import Driver, Mailbox, freed
from everystep.drivers.synced import synced
from everystep.engine import Engine, Lockstep
from everystep.engine.collect import Collector
from everystep.engine.decided import results_of
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import RequestError, UnsupportedError
from everystep.nn.modes import inference_mode, ordinary_mode
from everystep.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    Output,
)
from everystep.requests.arrays import require
from everystep.requests.caches import fill_cache, hide_past, read_cache, with_seen
from everystep.requests.door import Arguments
from everystep.requests.inputs import Inputs
from everystep.requests.options import NO_RECORDING, Ends, Options
from everystep.requests.pictures import NOTHING_HELD, Held
from everystep.requests.prepare import Call, prepare
from everystep.requests.reading import cut_by_default, read_options, require_output_object
from everystep.requests.rectangles import read_inputs, with_negative
from everystep.requests.subject import Subject
from everystep.streamers import Delivery, Wording
from everystep.types import Event, Finished, Group
from everystep.types.sources import EncoderSource

_READ_OUT = 512  # positions whose logits, (positions, V), are read out at once for prompt_logprobs


def generate(model: Subject, given: Arguments) -> Any:
    """Return new tokens after every row: a (rows, length) tensor, or an output object on request.

    `given`: what was passed to `model.generate`.
    """
    beside, streamer = given.beside, given.beside.streamer
    if streamer is not None:
        require("streamer", streamer, "put", "end")
    loop = beside.custom_generate if isinstance(beside.custom_generate, Loop) else None
    # Options are equal in all processes; a prompt may be refused in one.
    options = read_options(model, given, beside.tokenizer)
    with synced(model, (options,), _together(beside.synced_gpus, loop)):
        inputs, past = call_inputs(model, given, options)
        call = prepare(model, options, inputs, past, "lockstep" if loop is None else "loop")
        if loop is not None:
            refuse_unseen(call, loop)
        notices = call.options.effective.notices
        if given.prompt.attention_mask is None and inputs.batch > 1:
            notices += _padding_notices(given.prompt.input_ids, options.ends)
        for notice in notices:
            warnings.warn(notice, stacklevel=3)
        delivery = None if streamer is None else delivery_of(call, streamer)
        with inference_mode():
            call = completed(model, call)
            if loop is None:
                return _run(model, call, delivery, given.prompt.past_key_values)
    with torch.no_grad():
        return run_loop(model, call, loop, given)


def _together(asked: object, loop: Loop | None) -> bool | None:
    """Return whether forwards are made with other processes; None: where they have to be."""
    together: bool | None = FLAG.checked(asked, "synced_gpus") if asked is not None else None
    if together and loop is not None:
        raise RequestError(
            "synced_gpus is about the engine's own forwards, not those of custom_generate",
            wanted="one of the two",
            got="both",
            do="Leave synced_gpus out, and let the loop wait for the other processes",
        )
    return together


def call_inputs(model: Subject, given: Arguments, options: Options) -> tuple[Inputs, Cache | None]:
    """Return the inputs of a call, and the cache that it continues from."""
    if options.recording is not NO_RECORDING:
        require_output_object(options.recording, options.effective)
    prompt, past, seen = given.prompt, None, None
    if prompt.past_key_values is not None:
        past = read_cache(prompt.past_key_values, options.effective, model)
        if not model.is_encoder_decoder:
            prompt, seen = hide_past(prompt, past)
    held = NOTHING_HELD if past is None else Held.by(past, seen)
    inputs = read_inputs(model, prompt, options.ends, options.prefix, held)
    if seen is not None:
        inputs = with_seen(inputs, seen)
    negative = prompt.negative_prompt_ids, prompt.negative_prompt_attention_mask
    if any(one is not None for one in negative):
        scale = options.effective.guidance_scale
        inputs = with_negative(model, prompt, inputs, options.ends, scale)
    return inputs, past


def _padding_notices(ids: object, ends: Ends) -> tuple[str, ...]:
    """Return the warning to a caller whose prompts look padded in a way that cannot be
    recognised."""
    if ids is None or ends.pad not in ends.eos:
        return ()
    edges = torch.as_tensor(ids)[:, [0, -1]] == ends.pad
    if not edges.any() or edges.all():
        return ()
    return (
        "prompts begin or end with the pad id, which also ends sequences; wanted an attention_mask "
        "that says whether it is padding; got none. Pass the attention_mask that the tokenizer "
        "returned; without it every id is read.",
    )


# --- run ------------------------------------------------------------------------------------------


def delivery_of(call: Call, streamer: object) -> Delivery:
    """Return what follows a call; UnsupportedError where a streamer cannot."""
    rows, strategy, tokenizer = call.inputs.batch, call.strategy, call.options.tokenizer
    if not strategy.streams and rows * strategy.returns > 1 and not hasattr(streamer, "on_event"):
        raise UnsupportedError(
            "streamer cannot follow the beams of several results, which settle one by one",
            wanted="one prompt and num_return_sequences=1, or a streamer with on_event",
            got=f"{rows} prompts and num_return_sequences={strategy.returns}",
            do="Use es.stream, or leave the streamer out",
        )
    returns, fill = strategy.returns, call.options.ends.fill
    return Delivery(streamer, rows, returns, fill, Wording(tokenizer))


def _run(model: Subject, call: Call, delivery: Delivery | None, passed: object) -> Tensor | Output:
    e = call.options.effective
    cached, returned = e.use_cache is not False, e if e.return_dict_in_generate else None
    collector = Collector(
        slots=call.inputs.batch * call.kept_rows,
        width=call.kept_rows,
        scores=returned is not None and bool(returned.output_scores),
        logits=returned is not None and bool(returned.output_logits),
        captures=call.captures,
        windows=model.windows if returned is not None else (),
    )
    # Without a cache nothing of an earlier chunk would be left.
    chunk: int | None = e.prefill_chunk_size if cached else None
    if call.options.recording.prompt_logprobs is not None and cached:
        most = max(1, _READ_OUT // call.inputs.batch)
        chunk = min(most, chunk or most)
    lockstep = Lockstep(chunk=chunk, shares=cached)
    needs = frozenset().union(*(request.needs for request in call.requests))
    executor = model.executor(needs, call.quantization)
    observers = (collector,) if collector.keeps else ()
    engine = Engine(executor, lockstep, observers, early=delivery is not None)
    driver = Driver(engine)
    box = driver.submit(call.requests)
    groups, prompts = box.groups, call.inputs.table(call.options.ends.fill)
    opened = nullcontext() if delivery is None else delivery.open(prompts)
    with freed(driver, box), opened:
        _loop(driver, box, delivery, cached=cached)
    reasons = [done.reason for group in groups for done in group.done]
    for notice in cut_by_default(e, call.options.steering.criteria, reasons):
        warnings.warn(notice, stacklevel=4)
    # What callers get they may change in place and learn from, as tensors of inference mode forbid.
    with ordinary_mode(), torch.no_grad():
        own = fill_cache(call.cache, call.inputs, groups)
        past: object = None if own is None else model.core.returned_cache(own, passed)
        if own is not None and call.options.recording.legacy_cache:
            past = own.to_legacy_cache()
        finished = [done for group in groups for done in results_of(group)]
        returns, fill = call.strategy.returns, call.options.ends.fill
        sequences = _sequences(prompts, returns, fill, finished, model.device)
        if not e.return_dict_in_generate:
            return sequences
        out = _output(call, sequences, groups, finished, collector, past)
    first, total = box.took
    out.timings = {"prompt_seconds": first, "decode_seconds": total - first}
    out.timings["total_seconds"] = total
    if call.requests[0].drafter is not None:
        counts, gained = engine.counts, engine.gained_seconds
        out.speculation = {"drafted": counts.drafted, "accepted": counts.accepted}
        out.speculation["gained_seconds"] = gained
    return out


def _loop(
    driver: Driver, box: Mailbox, follow: Callable[[list[Event]], None] | None, *, cached: bool
) -> None:
    """Step until the rows are over; without a cache, every step feeds everything again.

    Raise the error of a row that ended by one.
    """
    while not box.over:
        driver.step()
        if follow is not None:
            follow(list(box.events))
        box.events.clear()
        for group in box.groups:
            if group.error is not None:
                raise group.error
            if not cached:
                driver.engine.preempt(group)


# --- what callers expect --------------------------------------------------------------------------


def _sequences(
    prompts: np.ndarray, returns: int, fill: int, finished: list[Finished], device: torch.device
) -> Tensor:
    """Return (B * returns, length) int64: pads, prompt, new tokens, then `fill` up to the longest.

    `prompts`: (B, width) the ids of the prompts, padded.
    """
    width, prompts = prompts.shape[1], prompts.repeat(returns, axis=0)
    longest = max(len(done.tokens) for done in finished)
    table = np.pad(prompts, ((0, 0), (0, longest)), constant_values=fill)
    for row, done in zip(table, finished, strict=True):
        row[width : width + len(done.tokens)] = done.tokens
    return torch.from_numpy(table).to(device)


def _output(
    call: Call,
    sequences: Tensor,
    groups: list[Group],
    finished: list[Finished],
    collector: Collector,
    past: object,
) -> Output:
    """Return transformers' output object for this kind of model and strategy, with our extras."""
    e, inputs, tokenizer = call.options.effective, call.inputs, call.options.tokenizer
    beams = not call.strategy.streams  # then it keeps paths of beams
    # Rows that have ended wait for the last one, which may catch up on them with drafts.
    steps = slice(None if beams else max(len(done.tokens) for done in finished))
    pads = np.repeat(np.array(inputs.margins), call.kept_rows)
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": collector.score_steps()[steps] if e.output_scores else None,
        "logits": collector.logit_steps()[steps] if e.output_logits else None,
    }
    layers = collector.layer_steps(pads)[steps] if e.output_hidden_states else None
    attentions = None
    if e.output_attentions:
        empty = np.array([inputs.total_width - prompt.length for prompt in inputs.prompts])
        empty = np.repeat(empty, call.kept_rows)
        attentions = collector.attention_steps(empty, inputs.lead)[steps]
    if beams:
        fields["beam_indices"] = _beam_indices(finished).to(sequences.device)
        scores = torch.tensor([done.score for done in finished], dtype=torch.float32)
        fields["sequences_scores"] = scores.to(sequences.device) if e.output_scores else None
    fields["finish_reasons"] = [done.reason for done in finished]
    fields["new_tokens"] = new = [done.tokens.tolist() for done in finished]
    if tokenizer is not None:
        fields["text"] = [tokenizer.decode(ids, skip_special_tokens=True) for ids in new]
    if call.options.recording.logprobs is not None:
        fields["logprobs"] = [choice_logprobs(done.memo, len(done.tokens)) for done in finished]
    if call.options.recording.prompt_logprobs is not None:
        fields["prompt_logprobs"] = [prompt_logprobs(group) for group in groups]
    fields["prompt_length"] = inputs.prompt_width
    fields["cached_tokens"] = [group.cached_tokens for group in groups]
    fields["effective_config"] = e
    fields["past_key_values"] = past
    if inputs.source is None:
        fields |= {"hidden_states": layers, "attentions": attentions}
        return (GenerateBeamDecoderOnlyOutput if beams else GenerateDecoderOnlyOutput)(**fields)
    fields |= {"decoder_hidden_states": layers, "decoder_attentions": attentions}
    fields |= _encoder_fields(call, inputs.source, collector, steps)
    kind = GenerateBeamEncoderDecoderOutput if beams else GenerateEncoderDecoderOutput
    return kind(**fields)


def _encoder_fields(
    call: Call, source: EncoderSource, collector: Collector, steps: slice
) -> dict[str, object]:
    """Return what the rows' encoders showed, each at its place in the rectangle that was passed."""
    e = call.options.effective
    starts = [int(place[0]) for place in source.places]
    width = source.width or max(int(place[-1]) + 1 for place in source.places)

    def placed(rows: list[list[Tensor]], axes: int) -> tuple[Tensor, ...]:
        """Return a tensor per layer from (1, ..., S, ...) of every row; the S of `axes` axes
        grow."""
        grown = [
            [_grown(layer, start, width, axes) for layer in layers]
            for layers, start in zip(rows, starts, strict=True)
        ]
        return tuple(map(torch.stack, zip(*grown, strict=True)))

    fields: dict[str, object] = {}
    if e.output_hidden_states and call.heard:
        fields["encoder_hidden_states"] = placed([one.layers for one in call.heard], 1)
    if e.output_attentions:
        if call.heard:
            fields["encoder_attentions"] = placed([one.attentions for one in call.heard], 2)
        across = np.repeat(np.array(starts), call.kept_rows)
        fields["cross_attentions"] = collector.cross_steps(across, width)[steps]
    return fields


def _grown(layer: Tensor, start: int, width: int, axes: int) -> Tensor:
    """Return (1, S, E) or, with two axes, (1, H, S, S) -> without the first, S grown to `width`."""
    after = max(0, width - start - layer.shape[-2])  # layers of images may have several sizes
    last = (start, after) if axes == 2 else (0, 0)
    return torch.nn.functional.pad(layer[0], (*last, start, after))


def _beam_indices(finished: list[Finished]) -> Tensor:
    """Return (sequences, longest) int32: the beam each token came from, -1 beyond the end."""
    chains = [done.memo.get("beams") for done in finished]
    paths = [[] if chain is None else chain.values() for chain in chains]
    longest = max(len(path) for path in paths)
    table = np.full((len(paths), longest), -1, dtype=np.int32)
    for row, path in enumerate(paths):
        table[row, : len(path)] = path
    return torch.from_numpy(table)
