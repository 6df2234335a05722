"""What has to be computed before the requests of a call can run: healed tokens, encoder states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from everystep.bridge.core import ForeignModel
from everystep.drivers.healing import healed
from everystep.executors.choice import encoder_of
from everystep.models import Model
from everystep.nn.network import Heard
from everystep.requests.features import with_features
from everystep.requests.pictures import Seen, with_pictures
from everystep.requests.prepare import Call, prepare
from everystep.requests.subject import Subject
from everystep.types.request import SecondStates
from everystep.types.sources import EncoderSource


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
    shows = call.captures and not source.states
    heard = tuple(Heard() for _ in source.prompts) if shows else ()
    states = encoder_states(model, source, heard)
    if not source.places:
        widths = [one.layers[-1].shape[-2] for one in heard] or [*map(len, states)]
        placed = source.placed(states, max(widths))
        call = replace(call, inputs=replace(call.inputs, source=placed))
    second = _second_states(model, call, states)
    heard_by = []
    for request, state, beside in zip(call.requests, states, second, strict=True):
        companions = tuple(replace(one, encoder=state) for one in request.companions)
        prompt = replace(request.prompt, encoder=state)
        heard_by.append(replace(request, prompt=prompt, companions=companions, second=beside))
    return replace(call, requests=tuple(heard_by), heard=heard)


def _second_states(
    model: Subject, call: Call, states: tuple[Tensor, ...]
) -> Iterator[SecondStates]:
    """Yield for each row what the encoders of second models make of its source; `states`: what the
    model's own does."""
    source, none = call.inputs.source, (None,) * len(states)
    assistant, amateur = call.options.drafting.assistant, call.options.choosing.amateur
    drafted: Sequence[Tensor | None] = none
    if call.options.effective.assistant_early_exit is not None:
        drafted = states  # its own first layers
    elif source is not None and source.assistant:
        drafted = source.assistant
    elif source is not None and assistant is not None and assistant.core.network.encodes:
        drafted = _encoded(assistant.core, assistant.executor_name, source)
    contrasted: Sequence[Tensor | None] = none
    if source is not None and amateur is not None and amateur.is_encoder_decoder:
        contrasted = _encoded(amateur.core, amateur.executor_name, source)
    return map(SecondStates, drafted, contrasted)


def encoder_states(
    model: Subject, source: EncoderSource, heard: Sequence[Heard] = ()
) -> tuple[Tensor, ...]:
    """Return (B,) states (S, E): the caller's, or made of the prompts; `heard`, if any, (B,) gets
    what the encoder's layers show."""
    return source.states or _encoded(model.core, model.executor_name, source, heard)


def _encoded(
    core: Model | ForeignModel,
    executor: str,
    source: EncoderSource,
    heard: Sequence[Heard] = (),
) -> tuple[Tensor, ...]:
    """Return (B,) states of the prompts, by what encodes where that executor runs."""
    encode = core.encode
    if not isinstance(core, ForeignModel):
        encode = partial(core.encode, by=encoder_of(core, executor))
    shown = heard or (None,) * len(source.prompts)
    return tuple(map(encode, source.prompts, shown))
