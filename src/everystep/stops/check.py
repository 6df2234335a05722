"""Asks all stops about all candidates of a step: which of them end, and why.

Equal stops are asked once, whichever requests have them, and different ones of a class with `stack`
as one. Where several say yes, the first of `ORDER` gives the reason: what
was said (an end token, a string) before limits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.types import FinishReason
from everystep.types.candidates import Candidates
from everystep.types.protocols import Stop

ORDER: tuple[type, ...] = (EosToken, StopStrings, MaxLength, MaxTime, UserStop)
_RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(ORDER)}

Reasons = list[FinishReason | None]
Asked = list[tuple[Any, list[int]]]


def check(candidates: Candidates) -> Reasons:
    """Why each candidate ends, or None where it goes on."""
    reasons: Reasons = [None] * len(candidates)
    _explain(candidates, reasons)
    return reasons


def _explain(candidates: Candidates, reasons: Reasons) -> None:
    """Writes why each candidate ends, for those that do."""
    shared = candidates.parents[0].request.stops if candidates.parents else ()
    if all(parent.request.stops is shared for parent in candidates.parents):
        for stop in sorted(shared, key=_rank):
            _ask(stop, candidates, None, reasons)
        return
    kinds = _by_kind(candidates)
    for kind in sorted(kinds, key=lambda one: _RANK.get(one, len(ORDER))):
        for stop, members in _together(kinds[kind]):
            everyone = members == list(range(len(candidates)))
            _ask(stop, candidates, None if everyone else members, reasons)


def _rank(stop: Stop) -> int:
    return _RANK.get(type(stop), len(ORDER))


def _by_kind(candidates: Candidates) -> dict[type, Asked]:
    """Of each kind the stops, and which candidates' requests have them."""
    tuples: dict[int, tuple[tuple[Stop, ...], list[int]]] = {}
    for c, parent in enumerate(candidates.parents):
        stops = parent.request.stops
        tuples.setdefault(id(stops), (stops, []))[1].append(c)
    kinds: dict[type, Asked] = {}
    for stops, members in tuples.values():
        for stop in stops:
            kinds.setdefault(type(stop), []).append((stop, members))
    return kinds


def _together(entries: Asked) -> Asked:
    """Stops of one kind, each distinct one once, or as one stop where they can be stacked."""
    stack = getattr(type(entries[0][0]), "stack", None)
    if len(entries) > 1 and stack is not None:
        owned = [(stop, c) for stop, members in entries for c in members]
        return [(stack([stop for stop, _ in owned]), [c for _, c in owned])]
    distinct: dict[Any, dict[int, None]] = {}
    for stop, members in entries:
        distinct.setdefault(stop, {}).update(dict.fromkeys(members))
    return [(stop, list(members)) for stop, members in distinct.items()]


def _ask(stop: Stop, candidates: Candidates, members: list[int] | None, reasons: Reasons) -> None:
    """Asks about the given candidates, or about all."""
    asked = candidates if members is None else candidates.select(np.array(members))
    for a in stop(asked).nonzero()[0].tolist():
        c = a if members is None else members[a]
        if reasons[c] is None:
            reasons[c] = stop.reason(asked, a)
