"""Which processors a request has: those that its configuration asks for, and the caller's.

A processor of the caller that is of exactly the class that a field asks for as well takes that
one's place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from warnings import warn

from everystep.processors.base import UserProcessor, reads_rows
from everystep.processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor
from everystep.processors.order import AFTER, BEFORE, BY_NAME, SAMPLERS, Facts, Maker, Values
from everystep.processors.stacking import at_row
from everystep.types.protocols import Processor


def build(effective: Values, facts: Facts) -> tuple[Processor, ...]:
    """All processors of a request, in order.

    `effective`: every field's value by name, as `Effective` has them. RequestError for values that
    this model or prompt cannot have; UserWarning for one that has no effect here.
    """
    before, free = _replaced(_made(BEFORE, effective, facts), _users(facts))
    guiding, free = _guiding(effective, free)
    samplers = _made(SAMPLERS, effective, facts) if effective["do_sample"] else []
    place = {
        kind: i for i, name in enumerate(effective["sampler_order"] or ()) for kind in BY_NAME[name]
    }
    return (
        *map(_at_slot, guiding),
        *before,
        *map(_at_slot, free),
        *sorted(samplers, key=lambda one: place.get(type(one), len(place))),
        *_made(AFTER, effective, facts),
    )


def _made(makers: Mapping[type, Maker], values: Values, facts: Facts) -> list[Processor]:
    made = (make(values, facts) for make in makers.values())
    return [one for one in made if one is not None]


def _users(facts: Facts) -> list[Any]:
    """The caller's processors, with the row's own values where they have one per row."""
    own = (at_row(one, facts.row, facts.rows) if reads_rows(one) else one for one in facts.user)
    return [*own]


def _replaced(built: list[Processor], user: Sequence[Any]) -> tuple[list[Processor], list[Any]]:
    """The built processors, some of them replaced by the caller's, and the caller's others."""
    free = [one for i, one in enumerate(user) if not any(one is other for other in user[:i])]
    for place, own in enumerate(built):
        for given in free:
            if type(given) is type(own):
                warn(
                    f"the given {type(own).__name__} replaces the one that generate()'s own "
                    f"arguments ask for: {own}",
                    UserWarning,
                    stacklevel=4,
                )
                built[place] = given
                free = [one for one in free if one is not given]
                break
    return built, free


def _guiding(values: Values, free: list[Any]) -> tuple[list[Any], list[Any]]:
    """The caller's guidance where a field asks for guidance too, and the caller's others.

    It stands in the place of the companion rows: before everything else.
    """
    own = [one for one in free if type(one) is UnbatchedClassifierFreeGuidanceLogitsProcessor][:1]
    if not own or values["guidance_scale"] in (None, 1):
        return [], free
    warn(
        "the given UnbatchedClassifierFreeGuidanceLogitsProcessor replaces the guidance that "
        "guidance_scale asks for",
        UserWarning,
        stacklevel=4,
    )
    return own, [one for one in free if one is not own[0]]


def _at_slot(given: Any) -> UserProcessor:
    if isinstance(given, UserProcessor):
        return given
    return UserProcessor(given, takes_rows=reads_rows(given))
