"""Asks all stops about all candidates of a step: which of them end, and why.

Equal stops are asked once, whichever requests have them, and different ones of a class with `stack`
as one. Where several say yes, what was said (an end token, a string) goes before limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from everystep.stops.ends import EosToken, MaxLength, MaxTime, UserStop
from everystep.stops.strings import StopStrings
from everystep.types import FinishReason, Sequence
from everystep.types.request import Candidates, Stop

_ORDER = (EosToken, StopStrings, MaxLength, MaxTime, UserStop)
_RANK: dict[type, int] = {kind: rank for rank, kind in enumerate(_ORDER)}


def check(candidates: Candidates) -> list[FinishReason | None]:
    """Return why each candidate ends, or None where it goes on."""
    reasons: list[FinishReason | None] = [None] * len(candidates)
    parents = candidates.parents
    shared = parents[0].request.stops if parents else ()
    if not [one for one in parents if one.request.stops is not shared]:
        for stop in sorted(shared, key=_rank):
            _ask(stop, candidates, range(len(candidates)), reasons)
        return reasons
    for stop, members in _of_strangers(parents):
        everyone = members == list(range(len(candidates)))
        asked = candidates if everyone else candidates.select(np.array(members))
        _ask(stop, asked, members, reasons)
    return reasons


def _rank(stop: Stop) -> int:
    return _RANK.get(type(stop), len(_ORDER))


def _of_strangers(parents: list[Sequence]) -> Iterator[tuple[Stop, list[int]]]:
    """Yield the stops of different requests in order, each with the candidates that have it."""
    kinds: dict[type, list[tuple[Any, int]]] = {}
    for c, parent in enumerate(parents):
        for stop in parent.request.stops:
            kinds.setdefault(type(stop), []).append((stop, c))
    for kind, owned in sorted(kinds.items(), key=lambda entry: _rank(entry[1][0][0])):
        if hasattr(kind, "stack"):
            yield kind.stack([stop for stop, _ in owned]), [c for _, c in owned]
            continue
        distinct: dict[Stop, list[int]] = {}
        for stop, c in owned:
            distinct.setdefault(stop, []).append(c)
        yield from distinct.items()


def _ask(
    stop: Stop, asked: Candidates, members: list[int] | range, reasons: list[FinishReason | None]
) -> None:
    """Write why candidates end; `members`: their places among all."""
    for a in stop(asked).nonzero()[0].tolist():
        if reasons[members[a]] is None:
            reasons[members[a]] = stop.reason(asked, a)
