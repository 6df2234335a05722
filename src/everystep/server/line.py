"""The line in which asks wait for the engine: who is next.

Keys have fair shares, as virtual token counters give them: whoever has been given the fewest tokens
for its weight is next. Tokens are counted as expected when an ask begins, and as made when it is
over. Of one key's asks those of a lower priority number come first; an ask that
has waited long comes before one of a lower number that came much later. What nobody waits for (the
lines of batches) comes after everything else, unless it has waited for very long, and leaves some
rows free. What needs no rows of the engine (likelihoods, sounds, runs) waits in the same line, is
charged alike, and begins while its lane has room.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

from everystep.server.quotas import QuotaBook

_AGEING = 5.0
"""Seconds that a step of priority is worth."""
_PATIENCE = 60.0
"""Seconds after which what nobody waits for is like everything else."""
_LANES = {"score": 2, "hear": 2, "run": 8}
"""What is worked on beside the rows, and how many asks of it have begun at most; half of them of
one key."""


@dataclass(frozen=True, slots=True)
class LinePlace:
    """The place of an ask in the line: whose it is, and what it needs.

    `positions`: ids of its prompt; `tokens`: new ones at most; `rows`: at least. `priority`: a
    lower one comes first. `background`: nobody waits for it. `lane`: what it is worked on by beside
    the rows: "score", "hear" or "run"; none for what needs rows.
    """

    owner: str | None = None
    positions: int = 0
    tokens: int = 0
    rows: int = 1
    priority: int = 0
    background: bool = False
    lane: str = ""

    @property
    def flow(self) -> tuple[bool, str | None]:
        """The asks with which it shares what it is charged."""
        return self.background, self.owner

    @property
    def queue(self) -> tuple[bool, str | None, str]:
        """The asks behind which it waits."""
        return self.background, self.owner, self.lane


@dataclass(slots=True)
class _InLine:
    place: LinePlace
    since: float


class WaitingLine:
    """The asks of one model that wait, and those that the engine has.

    `book`: what keys may use and use.
    """

    def __init__(
        self, book: QuotaBook | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.book, self._clock = book or QuotaBook(), clock
        self._heaps: dict[tuple[bool, str | None, str], list[tuple[float, int]]] = {}
        self._waiting: dict[int, _InLine] = {}
        self._begun: dict[int, LinePlace] = {}
        self._charged: dict[int, float] = {}  # tokens that each who has begun is expected to make
        self._usual = 64.0  # tokens of an ask, the mean of the last ones
        self._counters: dict[tuple[bool, str | None], float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> int:
        """The rows of the asks that the engine has."""
        return sum(one.rows for one in self._begun.values() if not one.lane)

    @property
    def positions(self) -> int:
        """The ids of the prompts that wait, and that somebody waits for."""
        waiting = self._waiting.values()
        return sum(one.place.positions for one in waiting if not one.place.background)

    @property
    def asked(self) -> int:
        """The number of asks that wait, and that somebody waits for."""
        return sum(not one.place.background for one in self._waiting.values())

    def enter(self, number: int, place: LinePlace) -> None:
        """Wait from now on."""
        active = self._active()
        if place.flow not in active:
            # Whoever was away has saved nothing up.
            least = min((self._counters.get(one, 0.0) for one in active), default=0.0)
            self._counters[place.flow] = max(self._counters.get(place.flow, 0.0), least)
        now = self._clock()
        self._waiting[number] = _InLine(place, now)
        turn = now + place.priority * _AGEING
        heapq.heappush(self._heaps.setdefault(place.queue, []), (turn, number))

    def leave(self, number: int, made: int = 0) -> None:
        """Wait no longer, or be over; `made`: tokens that came of it."""
        if (place := self._begun.pop(number, None)) is not None:
            self._counters[place.flow] += self._cost(place, made - self._charged.pop(number))
            self._usual += 0.1 * (made - self._usual)
            if not place.lane:
                self.book.use_rows(place.owner, -place.rows)
            self.book.use_tokens(place.owner, made)
        self._waiting.pop(number, None)

    def begin(self, rows: int) -> list[int]:
        """Return who begins now in an engine of so many rows: a few more than fit, so that none is
        empty while the next ask is read."""
        found: list[int] = []
        while (number := self._next(rows)) is not None:
            heapq.heappop(self._heaps[self._waiting[number].place.queue])
            place = self._waiting.pop(number).place
            self._begun[number] = place
            expected = min(float(place.tokens), self._usual)
            self._charged[number] = expected
            self._counters[place.flow] += self._cost(place, place.positions + expected)
            if not place.lane:
                self.book.use_rows(place.owner, place.rows)
            self.book.use_tokens(place.owner, place.positions)
            found.append(number)
        return found

    def _next(self, rows: int) -> int | None:
        """Return whose turn it is; None where nobody who waits may begin."""
        best: tuple[bool, float, float, int] | None = None
        full = self.rows >= rows + max(2, rows // 8)
        for queue, heap in list(self._heaps.items()):
            while heap and heap[0][1] not in self._waiting:
                heapq.heappop(heap)  # it has left
            if not heap:
                del self._heaps[queue]
                continue
            turn, number = heap[0]
            one = self._waiting[number]
            if not self._has_room(one.place, rows, full):
                continue
            late = one.place.background and self._clock() - one.since < _PATIENCE
            key = late, self._counters[one.place.flow], turn, number
            best = key if best is None else min(best, key)
        return None if best is None else best[3]

    def _has_room(self, place: LinePlace, rows: int, full: bool) -> bool:
        """Return whether an ask may begin, among those that have; `full`: the rows are used."""
        if place.lane:
            most = _LANES[place.lane]
            begun = [one.owner for one in self._begun.values() if one.lane == place.lane]
            return len(begun) < most and begun.count(place.owner) < most // 2
        if full or not self.book.has_rows(place.owner, place.rows):
            return False
        return not place.background or self._leaves_rows(place, rows)

    def _leaves_rows(self, place: LinePlace, rows: int) -> bool:
        """Return whether so much that nobody waits for leaves a quarter of the rows to others."""
        begun = self._begun.values()
        used = sum(one.rows for one in begun if one.background and not one.lane)
        return not used or used + place.rows <= rows - rows // 4

    def _cost(self, place: LinePlace, tokens: float) -> float:
        return tokens / self.book.of(place.owner).weight

    def _active(self) -> set[tuple[bool, str | None]]:
        """Return the flows that wait or that the engine works on."""
        waiting = {one.place.flow for one in self._waiting.values()}
        return waiting | {one.flow for one in self._begun.values()}
