"""What has to be computed before the requests of a call can run: healed tokens, encoder states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from everystep.bridge.core import ForeignModel
from everystep.drivers.healing import healed
from everystep.executors.choice import encoder_of
from everystep.nn.network import Heard
from everystep.requests.features import with_features
from everystep.requests.inputs import EncoderSource
from everystep.requests.pictures import Seen, with_pictures
from everystep.requests.prepare import Call, prepare
from everystep.requests.subject import Subject


def completed(model: Subject, call: Call, seen: Seen | None = None) -> Call:
    """Return the call with what has to be computed before its requests can run: tokens that heal
    its prompts, and what an encoder makes of them.

    `seen`: pictures that other calls have brought, None for none.
    """
    if call.options.effective.token_healing:
        inputs = healed(model, call.inputs, call.options)
        call = prepare(model, call.options, inputs, runs=call.runs)
    source = call.inputs.source
    if source is None:
        requests, values, pictures = call.requests, call.inputs.values, call.inputs.pictures
        if declared := model.prompt_inputs:
            requests = with_features(declared, requests, values, model.width)
        if any(pictures):
            requests = with_pictures(model, requests, pictures, seen)
        return call if requests is call.requests else replace(call, requests=requests)
    heard = tuple(Heard() for _ in source.prompts) if call.captures else ()
    states = encoder_states(model, source, heard)
    if not source.places:
        call = replace(call, inputs=replace(call.inputs, source=source.encoded(states, heard)))
    heard_by = []
    for request, state in zip(call.requests, states, strict=True):
        companions = tuple(replace(one, encoder=state) for one in request.companions)
        prompt = replace(request.prompt, encoder=state)
        heard_by.append(replace(request, prompt=prompt, companions=companions))
    return replace(call, requests=tuple(heard_by), heard=heard)


def encoder_states(
    model: Subject, source: EncoderSource, heard: Sequence[Heard] = ()
) -> tuple[Tensor, ...]:
    """Return (B,) states (S, E): the caller's, or made of the prompts; `heard`, if any, (B,) gets
    what the encoder's layers show."""
    core = model.core
    encode = core.encode
    if not isinstance(core, ForeignModel):
        encode = partial(core.encode, by=encoder_of(core, model.executor_name))
    shown = heard or (None,) * len(source.prompts)
    return source.states or tuple(map(encode, source.prompts, shown))
