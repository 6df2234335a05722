"""`generate` over a rectangle: the reference's call, answered by the engine in lockstep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.api import rectangle
from everystep.api.arguments import callables, require, require_one, split
from everystep.api.caches import loop_cache, with_cache
from everystep.api.call import Call, Host, UserParts, resolve
from everystep.api.custom import run_loop, take_own
from everystep.api.healing import Continue, check_healing, healed
from everystep.api.lengths import context_notices
from everystep.api.past import (
    continued,
    hide_past,
    leave,
    read_cache,
    require_possible,
    with_seen,
)
from everystep.api.prompts import Source, encode, padding_notices, read_negative, read_prompts
from everystep.api.resolve import read_tokens, refuse_unbuilt, require_output_object
from everystep.config import GenerationConfig, merge_configs
from everystep.engine import Engine, Lockstep
from everystep.engine.collect import Collector
from everystep.errors import UnsupportedError, message
from everystep.nn.modes import inference_mode, modes_kept, ordinary_mode
from everystep.outputs import Output
from everystep.streamers import Delivery, Wording
from everystep.text import Tokenizer
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
    tokenizer = user.get("tokenizer")
    delivery = None if streamer is None else _delivery(call, streamer, tokenizer)
    with inference_mode():
        if call.effective.token_healing:
            call = with_cache(_heal(model, call), model, source, None)
        call = encode(call, model, source)
        if loop is None:
            out = _run(model, call, delivery, source)
    if loop is not None:
        with modes_kept(), torch.no_grad():
            return run_loop(model, call, loop_cache(call, model, source), user, own)
    if isinstance(out, Output) and tokenizer is not None:
        out.text = [tokenizer.decode(ids, skip_special_tokens=True) for ids in out.new_tokens or ()]
    return out


def _delivery(call: Call, streamer: Any, tokenizer: Any) -> Delivery:
    rows, strategy = call.inputs.batch, call.strategy
    if not strategy.streams and rows * strategy.returns > 1 and not hasattr(streamer, "on_event"):
        raise UnsupportedError(
            message(
                "streamer cannot follow the beams of several results, which settle one by one",
                wanted="one prompt and num_return_sequences=1, or a streamer with on_event",
                got=f"{rows} prompts and num_return_sequences={strategy.returns}",
                do="Use es.stream, or leave the streamer out",
            )
        )
    wording = Wording(tokenizer if isinstance(tokenizer, Tokenizer) else None)
    return Delivery(streamer, rows, strategy.returns, call.tokens.fill, wording)


def prepare(
    model: Host,
    generation_config: GenerationConfig | None,
    user: dict[str, Any],
    kwargs: dict[str, Any],
) -> tuple[Call, Source]:
    """Everything that can be wrong with a call is known after this, before any compute."""
    config, given = split(kwargs)
    effective = merge_configs(config, generation_config, model.generation_config)
    past = read_cache(given, effective, model)
    refuse_unbuilt(effective)
    tokens = read_tokens(effective, model.vocab_size)
    given, seen = hide_past(given, None if model.is_encoder_decoder else past)
    inputs, source = read_prompts(model, given, tokens)
    inputs = with_seen(inputs, seen)
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
    call = replace(call, inputs=continued(inputs, past, call.strategy.width))
    require_possible(call, past, user.get("custom_generate"))
    call = with_cache(call, model, source, past)
    for notice in (
        *call.effective.notices,
        *padding_notices(given, inputs, tokens),
        *context_notices(call.effective, call.inputs, call.limits, model.context),
    ):
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


def _run(model: Host, call: Call, delivery: Delivery | None, source: Source) -> Any:
    asked = bool(call.effective.return_dict_in_generate)
    requests = call.requests(lingers=call.lingers)
    collector = Collector(
        slots=call.inputs.batch * call.strategy.kept_rows,
        width=call.strategy.kept_rows,
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
    lockstep = Lockstep(chunk=None if whole else _chunk(call), shares=cached)
    needs = frozenset().union(*(request.needs for request in requests))
    executor = model.executor(needs, call.quantization)
    engine = Engine(executor, lockstep, observers, early=delivery is not None)
    groups = [engine.submit(request) for request in requests]
    with _freed(engine, groups), _opened(delivery, call):
        timings = _loop(engine, groups, delivery, cached=cached)
    # What callers get they may change in place and learn from, as tensors of inference mode forbid.
    with ordinary_mode(), torch.no_grad():
        past = leave(call, groups, source.places)
        if not asked:
            return rectangle.sequences(call, groups, model.device)
        out = rectangle.output(call, groups, collector, model.device)
    out.past_key_values = past
    out.timings = timings
    if "truncate" in call.strategy.needs:
        counts = engine.counts
        out.speculation = {"drafted": counts.drafted, "accepted": counts.accepted}
    return out


@contextmanager
def _freed(engine: Engine, groups: list[Group]) -> Iterator[None]:
    """No row survives a call that fails, be it by its streamer."""
    try:
        yield
    except BaseException:
        for group in groups:
            if group in engine.scheduler.groups:
                engine.cancel(group)
        raise


def _opened(delivery: Delivery | None, call: Call) -> AbstractContextManager[Any]:
    """The streamer, if there is one, has the prompt, and in the end learns of the end."""
    if delivery is None:
        return nullcontext()
    rows = range(call.inputs.batch)
    return delivery.open(np.stack([call.inputs.visible(r, call.tokens.fill) for r in rows]))


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
