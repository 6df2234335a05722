"""`generate` over a rectangle: the reference's call, answered by the engine in lockstep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.api import rectangle
from everystep.api.arguments import require_one, split
from everystep.api.call import Call, Host, UserParts, resolve
from everystep.api.inputs import Inputs, read_inputs
from everystep.api.resolve import Tokens, read_tokens, refuse_unbuilt, require_output_object
from everystep.config import Effective, GenerationConfig, merge_configs
from everystep.engine import Engine, Lockstep
from everystep.engine.collect import Collector
from everystep.errors import RequestError, UnsupportedError, message
from everystep.outputs import Output
from everystep.types import Event, Group, Prompt

_READ_OUT = 512  # positions whose logits are read out at once for prompt_logprobs


def generate(
    model: Host,
    inputs: Tensor | None,
    generation_config: GenerationConfig | None,
    user: dict[str, Any],
    kwargs: dict[str, Any],
) -> Any:
    """New tokens after every row; a (rows, length) tensor, or an output object on request.

    `user`: what is neither configuration nor model input (processors, stops, seed, streamer, ...).
    """
    require_one("input_ids", inputs, kwargs)
    call = prepare(model, generation_config, user, kwargs)
    streamer = user.get("streamer")
    if streamer is not None and not call.strategy.streams:
        raise UnsupportedError(
            message(
                "streamer cannot follow beams: their tokens may still change",
                wanted="greedy decoding or sampling",
                got=f"num_beams={call.strategy.width}",
                do="Leave the streamer out, or set num_beams=1",
            )
        )
    with torch.inference_mode():
        out = _run(model, call, streamer)
    tokenizer = user.get("tokenizer")
    if isinstance(out, Output) and tokenizer is not None:
        out.text = [tokenizer.decode(ids, skip_special_tokens=True) for ids in out.new_tokens or ()]
    return out


def prepare(
    model: Host,
    generation_config: GenerationConfig | None,
    user: dict[str, Any],
    kwargs: dict[str, Any],
) -> Call:
    """Everything that can be wrong with a call is known after this, before any compute."""
    config, model_inputs = split(kwargs)
    effective = merge_configs(config, generation_config, model.generation_config)
    refuse_unbuilt(effective)
    for notice in effective.notices:
        warnings.warn(notice, stacklevel=4)
    tokens = read_tokens(effective)
    read = _encoder_inputs if model.is_encoder_decoder else _decoder_inputs
    inputs, encoder_ids = read(model, model_inputs, tokens)
    parts = UserParts(
        processors=tuple(user.get("logits_processor") or ()),
        criteria=user.get("stopping_criteria"),
        prefix_allowed_tokens=user.get("prefix_allowed_tokens_fn"),
        tokenizer=user.get("tokenizer"),
        seed=user.get("seed"),
        negative=_negative(model, effective, user, inputs, tokens),
        logprobs=user.get("logprobs"),
        prompt_logprobs=user.get("prompt_logprobs"),
    )
    require_output_object(parts.logprobs, parts.prompt_logprobs, effective.return_dict_in_generate)
    return resolve(
        effective,
        tokens,
        inputs,
        parts,
        vocabulary=model.vocab_size,
        context=model.context,
        encoder_ids=encoder_ids,
    )


def _decoder_inputs(
    model: Host, given: dict[str, Any], tokens: Tokens
) -> tuple[Inputs, Sequence[np.ndarray]]:
    if given.get("decoder_input_ids") is not None:
        raise RequestError(
            message(
                "decoder_input_ids was given to a model without an encoder",
                do="Pass the prompt as input_ids",
            )
        )
    return _read_prompt(model, given, tokens, given.get("position_ids")), ()


def _read_prompt(
    model: Host, given: dict[str, Any], tokens: Tokens, positions: Tensor | None
) -> Inputs:
    """The rectangle that the model, or its encoder, reads."""
    return read_inputs(
        given.get("input_ids"),
        given.get("attention_mask"),
        given.get("inputs_embeds"),
        positions,
        pad=tokens.pad,
        eos=tokens.eos,
        bos=tokens.bos,
        vocabulary=model.vocab_size,
    )


def _require_rows(found: Inputs, wanted: Inputs, pair: str, noun: str) -> None:
    if found.batch != wanted.batch:
        raise RequestError(
            message(
                f"{pair} differ in rows",
                wanted=wanted.batch,
                got=found.batch,
                do=f"Pass one {noun} per row",
            )
        )


def _encoder_inputs(
    model: Host, given: dict[str, Any], tokens: Tokens
) -> tuple[Inputs, Sequence[np.ndarray]]:
    """The encoder reads the inputs once; the decoder starts from its start token."""
    source = _read_prompt(model, given, tokens, None)
    start = given.get("decoder_input_ids")
    if start is None:
        if tokens.start is None:
            raise RequestError(
                message(
                    "the decoder has nothing to start from",
                    wanted="decoder_start_token_id or decoder_input_ids",
                    got="neither",
                    do="Set decoder_start_token_id",
                )
            )
        start = torch.full((source.batch, 1), tokens.start)
    decoder = read_inputs(
        start,
        None,
        None,
        None,
        pad=None,
        eos=tokens.eos,
        bos=tokens.bos,
        vocabulary=model.vocab_size,
        name="decoder_input_ids",
    )
    _require_rows(decoder, source, "decoder_input_ids and the inputs", "decoder prompt")
    with torch.inference_mode():
        prompts = tuple(
            Prompt(ids=one.ids, encoder=model.encode(row))
            for one, row in zip(decoder.prompts, source.prompts, strict=True)
        )
    ids = [row.ids for row in source.prompts if row.ids is not None]
    return Inputs(prompts, decoder.pads, decoder.width, 0), ids


def _negative(
    model: Host,
    effective: Effective,
    user: dict[str, Any],
    inputs: Inputs,
    tokens: Tokens,
) -> tuple[Prompt, ...]:
    ids = user.get("negative_prompt_ids")
    mask = user.get("negative_prompt_attention_mask")
    if ids is None:
        if mask is not None:
            raise RequestError(
                message(
                    "negative_prompt_attention_mask was given without negative_prompt_ids",
                    do="Pass both or neither",
                )
            )
        return ()
    if effective.guidance_scale is None or effective.guidance_scale == 1:
        raise RequestError(
            message(
                "negative_prompt_ids has no effect without guidance_scale",
                wanted="guidance_scale > 1",
                got=effective.guidance_scale,
                do="Set guidance_scale, or leave negative_prompt_ids out",
            )
        )
    negative = read_inputs(
        ids,
        mask,
        None,
        None,
        pad=tokens.pad,
        eos=tokens.eos,
        bos=tokens.bos,
        vocabulary=model.vocab_size,
        name="negative_prompt_ids",
    )
    _require_rows(negative, inputs, "negative_prompt_ids and the prompt", "negative prompt")
    encoders = [prompt.encoder for prompt in inputs.prompts]
    return tuple(
        Prompt(ids=one.ids, encoder=encoder)
        for one, encoder in zip(negative.prompts, encoders, strict=True)
    )


def _run(model: Host, call: Call, streamer: Any) -> Any:
    asked = bool(call.effective.return_dict_in_generate)
    requests = call.requests(lingers=call.lingers)
    collector = Collector(
        slots=call.inputs.batch * call.strategy.width,
        width=call.strategy.width,
        scores=asked and bool(call.effective.output_scores),
        logits=asked and bool(call.effective.output_logits),
        captures=call.wants.layers or call.wants.attentions,
        windows=model.windows,
    )
    observers = (collector,) if collector.keeps else ()
    cached = call.effective.use_cache is not False
    # What the layers of a prompt show is one piece, so it is fed as one piece where that is wanted;
    # and without a cache nothing of an earlier chunk would be left.
    whole = collector.captures or not cached
    lockstep = Lockstep(chunk=None if whole else _chunk(call))
    engine = Engine(model.executor(), lockstep, observers)
    groups = [engine.submit(request) for request in requests]
    follow = None if streamer is None else _Rectangle(call, streamer)
    try:
        timings = _loop(engine, groups, follow, cached=cached)
    finally:
        if streamer is not None:
            streamer.end()
    if not asked:
        return rectangle.sequences(call, groups, model.device)
    encoder = None
    if model.is_encoder_decoder:
        encoder = {"encoder_attentions": None, "encoder_hidden_states": None}
    out = rectangle.output(call, groups, collector, encoder, model.device)
    out.timings = timings
    return out


def _chunk(call: Call) -> int | None:
    """How many positions of a row are fed at once. A prompt whose logprobs are wanted is read out
    at every position, (positions, V) logits a step, so those are bounded."""
    asked = call.effective.prefill_chunk_size
    if call.user.prompt_logprobs is None:
        return asked
    bound = max(1, _READ_OUT // call.inputs.batch)
    return bound if asked is None else min(bound, asked)


def _loop(
    engine: Engine,
    groups: list[Group],
    follow: Callable[[list[Event]], None] | None,
    *,
    cached: bool,
) -> dict[str, float]:
    """Steps until nothing is pending; without a cache, every step feeds everything again.

    Returns how long it took until every row had its first token, and from there on.
    """
    begin = time.perf_counter()
    opened: float | None = None
    while engine.pending:
        events = engine.step()
        if opened is None and all(group.opened for group in groups):
            opened = time.perf_counter()
        if follow is not None:
            follow(events)
        if not cached:
            for group in groups:
                engine.preempt(group)

    end = time.perf_counter()
    opened = end if opened is None else opened
    return {
        "prompt_seconds": opened - begin,
        "decode_seconds": end - opened,
        "total_seconds": end - begin,
    }


class _Rectangle:
    """Gives a streamer of the reference what it expects: the prompt, then one id per row."""

    def __init__(self, call: Call, streamer: Any) -> None:
        self._rows = call.inputs.batch * call.strategy.returns
        self._returns = call.strategy.returns
        self._fill = call.tokens.fill
        self._streamer = streamer
        rows = [call.inputs.visible(row, self._fill) for row in range(call.inputs.batch)]
        streamer.put(torch.from_numpy(np.stack(rows)))

    def __call__(self, events: list[Event]) -> None:
        if self._rows == 1:
            tokens = [event.token for event in events if event.token >= 0]
            if tokens:
                self._streamer.put(torch.tensor(tokens))
            return
        row = torch.full((self._rows,), self._fill)
        for event in events:
            if event.token >= 0:
                row[int(event.request_id) * self._returns + event.index] = event.token
        self._streamer.put(row)
