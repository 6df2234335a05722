"""What a watched request is told of each step: what it fed, saw and chose, and how long it took.

It is told after the step has happened, so nothing that it does can change one. The times are those
of a clock that no decision reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from everystep.engine.apply import Change
from everystep.engine.batches import Scored
from everystep.engine.feed import Grant
from everystep.types import Answer, Children, Event, Group, Request
from everystep.types import Sequence as Row


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """A look at what one kind of strategy saw and chose in one step; made only for observers.

    `captures`: of a sequence whose request wants its layers or attentions, by its index, the first
    position fed and what was answered. `notes`: what watchers make of it, once for all of them.
    """

    scored: Scored
    children: Children
    captures: Mapping[int, tuple[int, Answer]]
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class WatchedStep:
    """One step of one request, as its watcher is told.

    `number`: rises from step to step of the engine. `record`: what was chosen, None where the step
    only fed, or ended the request; `place`: which of its groups this is. `fed`: of each sequence
    its index, the first position that it fed, and how many. `beside`: how many other requests were
    in the step.
    """

    request: Request
    number: int
    record: StepRecord | None
    place: int
    events: tuple[Event, ...]
    fed: tuple[tuple[int, int, int], ...]
    seconds: Mapping[str, float]
    beside: int


@dataclass(slots=True)
class Watch:
    """A look at a step that has watched requests, from its beginning on."""

    groups: list[Group]
    before: list[tuple[Group, Row, int]]
    last: float = field(default_factory=time.perf_counter)
    seconds: dict[str, float] = field(default_factory=dict)
    fed: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, grants: Iterable[Grant]) -> Watch | None:
        """Begin to look; None where nobody is watched."""
        groups = [grant.group for grant in grants]
        if all(group.request.watcher is None for group in groups):
            return None
        watched = [group for group in groups if group.request.watcher is not None]
        return cls(groups, [(group, s, s.cached) for group in watched for s in group.live])

    def mark(self, phase: str) -> None:
        """Note that a phase of the step is over."""
        now = time.perf_counter()
        self.seconds[phase], self.last = now - self.last, now

    def forwarded(self) -> None:
        """Note that the forward is over, and what it was fed."""
        self.mark("forward")
        for group, row, cached in self.before:
            if row.cached > cached:
                fed = (row.index, cached, row.cached - cached)
                self.fed.setdefault(id(group), []).append(fed)


def told(
    number: int,
    changes: Sequence[Change],
    records: Iterable[StepRecord],
    watch: Watch | None,
) -> deque[WatchedStep]:
    """Return what the watchers of these changes are told, and those of groups that only fed."""
    chosen: dict[int, tuple[StepRecord | None, int]] = {
        id(group): (record, place)
        for record in records
        for place, group in enumerate(record.scored.groups)
    }
    events = {id(change.group): tuple(change.events) for change in changes}
    groups = {id(change.group): change.group for change in changes}
    groups |= {id(group): group for group in (watch.groups if watch else ())}
    return deque(
        WatchedStep(
            group.request,
            number,
            *chosen.get(key, (None, 0)),
            events.get(key, ()),
            tuple(watch.fed.get(key, ())) if watch else (),
            dict(watch.seconds) if watch else {},
            len(watch.groups) - 1 if watch else 0,
        )
        for key, group in groups.items()
        if group.request.watcher is not None
    )
