"""`generate` over a rectangle: the reference's call, answered by the engine in lockstep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.api import rectangle
from everystep.api.arguments import callables, require, require_one, split
from everystep.api.call import Call, Host, UserParts, resolve
from everystep.api.custom import run_loop, take_own
from everystep.api.healing import Continue, check_healing, healed
from everystep.api.prompts import Source, encode, padding_notices, read_negative, read_prompts
from everystep.api.resolve import read_tokens, refuse_unbuilt, require_output_object
from everystep.config import GenerationConfig, merge_configs
from everystep.engine import Engine, Lockstep
from everystep.engine.collect import Collector
from everystep.errors import UnsupportedError, message
from everystep.outputs import Output
from everystep.types import Event, Group

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
    streamer = require("streamer", user.get("streamer"), "put", "end")
    loop = user.get("custom_generate")
    own = {} if loop is None else take_own(loop, kwargs)
    call, source = prepare(model, generation_config, user, kwargs)
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
        if call.effective.token_healing:
            call = _heal(model, call)
        call = encode(call, model, source)
        if loop is not None:
            return run_loop(model, call, user, own)
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
) -> tuple[Call, Source]:
    """Everything that can be wrong with a call is known after this, before any compute."""
    config, given = split(kwargs)
    effective = merge_configs(config, generation_config, model.generation_config)
    refuse_unbuilt(effective)
    tokens = read_tokens(effective, model.vocab_size)
    inputs, source = read_prompts(model, given, tokens)
    allowed = require("prefix_allowed_tokens_fn", user.get("prefix_allowed_tokens_fn"), "__call__")
    parts = UserParts(
        processors=callables("logits_processor", user.get("logits_processor")),
        criteria=user.get("stopping_criteria"),
        prefix_allowed_tokens=allowed,
        tokenizer=require("tokenizer", user.get("tokenizer"), "decode"),
        seed=user.get("seed"),
        negative=read_negative(model, effective, user, inputs, tokens),
        logprobs=user.get("logprobs"),
        prompt_logprobs=user.get("prompt_logprobs"),
    )
    require_output_object(parts.logprobs, parts.prompt_logprobs, effective.return_dict_in_generate)
    if effective.token_healing:
        check_healing(inputs, source.prompts or source.states, parts.tokenizer)
    call = resolve(
        effective,
        tokens,
        inputs,
        parts,
        vocabulary=model.vocab_size,
        context=model.context,
        encoder_ids=source.ids,
    )
    for notice in (*call.effective.notices, *padding_notices(given, inputs, tokens)):
        warnings.warn(notice, stacklevel=4)
    return call, source


def continue_by_one(model: Host) -> Continue:
    """What adds one token to a prompt: ids (1, T) and a configuration -> ids (1, T + 1)."""

    def choose(ids: Tensor, config: GenerationConfig) -> Tensor:
        whole = {"attention_mask": torch.ones_like(ids), "token_healing": False}
        chosen: Tensor = generate(model, ids, config, {}, whole)
        return chosen

    return choose


def _heal(model: Host, call: Call) -> Call:
    """The call with the last tokens of its prompts chosen anew."""
    inputs = healed(continue_by_one(model), call.inputs, call.user.tokenizer, call.tokens.fill)
    return resolve(
        call.effective,
        call.tokens,
        inputs,
        call.user,
        vocabulary=model.vocab_size,
        context=model.context,
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
