"""Which groups take part in a step, and how much each may feed: the only difference between an
offline batch and a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from everystep.engine.feed import Grant, scattered
from everystep.engine.prefixes import NO_LIMIT, Occupied, Reuse, Room
from everystep.errors import OversizeError
from everystep.types import Group

Preempt = Callable[[Group], None]
"""Takes a group's rows away; it will feed everything again."""
Join = Callable[[Group, list[Group], Room], bool]
"""Whether a group may feed, which first forks what rows of running groups hold of its prompt; if
not, one of them is just feeding what they share."""


class Scheduler(Protocol):
    """Decides; changes nothing but its own queue and, through `preempt` and `join`, a group's rows.

    `reuse`: which rows may be continued by other groups than those that fed them.
    """

    reuse: Reuse

    def submit(self, group: Group) -> None:
        """The group waits for its turn, or is refused because it can never have one."""

    def remove(self, group: Group) -> None:
        """The group is over."""

    def plan(self, preempt: Preempt, join: Join) -> list[Grant]:
        """Who feeds how much in the next step."""

    @property
    def room(self) -> Room:
        """The rows and positions that running groups leave."""

    @property
    def groups(self) -> list[Group]:
        """All groups that are not over, waiting ones last."""


@dataclass
class Lockstep:
    """All groups together, in order; no group chooses before every prompt is fed.

    `chunk`: the most positions a row feeds at once while its prompt is not fully fed, or None.
    `shares`: whether rows outlive a step; where they do not, what sequences share cannot be fed
    before the rest.
    """

    chunk: int | None = None
    shares: bool = True
    groups: list[Group] = field(default_factory=list)
    reuse: Reuse = field(default_factory=Reuse)

    @property
    def room(self) -> Room:
        return Room(0)

    def submit(self, group: Group) -> None:
        self.groups.append(group)

    def remove(self, group: Group) -> None:
        self.groups = [one for one in self.groups if one is not group]

    def plan(self, preempt: Preempt, join: Join | None = None) -> list[Grant]:
        if self.chunk is None:
            return [Grant(group, NO_LIMIT, self.shares) for group in self.groups]
        units = [len(group.live) * (1 + len(group.request.companions)) for group in self.groups]
        grants = [
            Grant(group, NO_LIMIT if _is_whole(group) else self.chunk * count, self.shares)
            for group, count in zip(self.groups, units, strict=True)
        ]
        return [grant for grant in grants if grant.group.pending > grant.tokens] or grants


@dataclass
class Continuous:
    """Groups come and go: admitted in order of arrival while their rows fit.

    `token_budget`: positions fed per step, drafts excluded; a prompt that is never fed in pieces
    may have more, with a step of its own. A group that finds too little of it
    left for its next choice is passed over, and comes first in a later step. `max_rows`: cache rows
    in use at once. `max_positions`: cached positions in use at once, or None; beyond it the
    youngest is preempted. `reuse`: as `Scheduler` says; a group that waits for another to feed what
    they share takes nothing of a step. A group that an interrupt left in both queues runs. `aside`:
    groups that were set aside, which feed nothing; they keep their rows until others need them.
    `served[id(group)]`: the last step in which the group fed, or else the one in which it was
    admitted. `planned`: the room that the last step left, None before the first.
    """

    token_budget: int = 2048
    max_rows: int = 256
    max_positions: int | None = None
    running: list[Group] = field(default_factory=list)
    waiting: deque[Group] = field(default_factory=deque)
    aside: list[Group] = field(default_factory=list)
    steps: int = 0
    served: dict[int, int] = field(default_factory=dict)
    reuse: Reuse = field(default_factory=Reuse)
    planned: Room | None = None

    @property
    def room(self) -> Room:
        held = [*self.running, *self._kept()]
        rows = self.max_rows - sum(group.rows for group in held)
        if self.max_positions is None:
            return Room(max(rows, 0))
        occupied = _occupied(held)
        return Room(max(rows, 0), max(self.max_positions - occupied.count(), 0), occupied.read)

    @property
    def groups(self) -> list[Group]:
        self._settle()
        return [*self.running, *self.aside, *self.waiting]

    def submit(self, group: Group) -> None:
        _require("rows", group.rows, self.max_rows, "max_rows")
        _require("positions per step", group.rows, self.token_budget, "token_budget")
        self.waiting.append(group)

    def remove(self, group: Group) -> None:
        self.running = [one for one in self.running if one is not group]
        self.aside = [one for one in self.aside if one is not group]
        if group in self.waiting:
            self.waiting = deque(one for one in self.waiting if one is not group)
        self.served.pop(id(group), None)

    def set_aside(self, group: Group) -> None:
        """The group feeds nothing until it is taken back."""
        self.remove(group)
        self.aside = [*self.aside, group]

    def take_back(self, group: Group) -> None:
        """A group that was set aside runs again, or is the next to, if it has lost its rows."""
        self.remove(group)
        if _has_rows(group):
            self.running = [*self.running, group]
        else:
            self.waiting.appendleft(group)

    def plan(self, preempt: Preempt, join: Join | None = None) -> list[Grant]:
        self._settle()
        self._shrink(preempt)
        self._admit(preempt)
        self.steps += 1
        for group in self.running:
            self.served.setdefault(id(group), self.steps)
        left, room = self.token_budget, self.room
        self.planned = room
        grants = []
        for group in sorted(self.running, key=self._turn):
            if join is not None and not join(group, self.running, room):
                continue
            used = _usable(group, left, first=left == self.token_budget)
            if used:
                grants.append(Grant(group, max(left, used)))
                self.served[id(group)] = self.steps
                left = max(left - used, 0)
        return grants

    def _turn(self, group: Group) -> tuple[int, bool, int]:
        """Return a key that sorts those served longest ago first, and of them those that have
        begun, in order of arrival."""
        return self.served[id(group)], not group.opened, group.rank

    def _settle(self) -> None:
        """No group is in both queues."""
        while self.waiting and any(one is self.waiting[0] for one in self.running):
            self.waiting.popleft()

    def _shrink(self, preempt: Preempt) -> None:
        """Preempts groups that are set aside, then the youngest, until the next step's positions
        fit; one always stays."""
        if self.max_positions is None:
            return
        for group in self._kept():
            if _occupied([*self.running, *self._kept()]).count() > self.max_positions:
                preempt(group)
        while len(self.running) > 1 and _occupied(self.running).count() > self.max_positions:
            youngest = max(self.running, key=lambda group: group.rank)
            preempt(youngest)
            self.waiting.appendleft(youngest)
            self.running = [one for one in self.running if one is not youngest]

    def _kept(self) -> list[Group]:
        """The groups that are set aside and have rows, those that others may take first."""
        return [group for group in self.aside if _has_rows(group)]

    def _admit(self, preempt: Preempt) -> None:
        if not self.waiting:
            return
        kept = self._kept()
        rows = sum(group.rows for group in [*self.running, *kept])
        occupied, limit = _occupied([*self.running, *kept]), self.max_positions or NO_LIMIT
        while self.waiting:
            first = self.waiting[0]
            rows += first.rows
            occupied.add(*_held_by(first))
            while kept and (rows > self.max_rows or occupied.count() > limit):
                preempt(kept[0])
                rows -= kept[0].rows
                occupied.remove(*_held_by(kept.pop(0)))
            if self.running and (rows > self.max_rows or occupied.count() > limit):
                return
            self.running = [*self.running, first]
            self.waiting.popleft()


@dataclass
class Turns:
    """One group at a time, the one whose turn it is; the others wait, with their rows.

    `token_budget`: positions fed per step, so that a long prompt is fed in chunks.
    """

    token_budget: int = 1024
    groups: list[Group] = field(default_factory=list)
    turn: Group | None = None
    reuse: Reuse = field(default_factory=Reuse)

    @property
    def room(self) -> Room:
        return Room(0)

    def submit(self, group: Group) -> None:
        _require("positions per step", group.rows, self.token_budget, "token_budget")
        self.groups = [*self.groups, group]

    def remove(self, group: Group) -> None:
        self.groups = [one for one in self.groups if one is not group]

    def plan(self, preempt: Preempt, join: Join | None = None) -> list[Grant]:
        whose = [one for one in self.groups if one is self.turn and not one.finished]
        least = self.token_budget
        return [Grant(one, max(least, one.pending) if _is_whole(one) else least) for one in whose]


def _usable(group: Group, left: int, *, first: bool) -> int:
    """Count the positions, of `left`, that the group can feed: all that it has to, for its next
    choice, or less of each row than its last position, which is of no use without the choice.

    Where sequences have lost their rows, the first alone feeds, what all of them share at most. A
    prompt that is fed whole goes beyond what is left if it is the `first` of a step.
    """
    shared = group.live[0].pending - 1 - len(group.request.companions)
    apart = scattered(group) and shared > 0
    if _is_whole(group):
        all_of_it = shared if apart else group.pending
        return all_of_it if first or all_of_it <= left else 0
    if apart:
        return min(left, shared)
    pending = group.pending
    return pending if pending <= left else min(left, group.pending_chunks)


def _is_whole(group: Group) -> bool:
    """Tell whether it has yet to feed a prompt that is never fed in pieces, as its parts belong
    together, or what layers show of it is one piece."""
    prompt, wants = group.request.prompt, group.request.wants
    whole = bool(prompt.whole) or wants.layers or wants.attentions
    return whole and any(one.cached < prompt.length for one in group.live)


def _has_rows(group: Group) -> bool:
    return any(unit.row is not None for sequence in group.live for unit in sequence.units)


def _occupied(groups: Iterable[Group]) -> Occupied:
    """The positions that groups hold."""
    return Occupied(map(_held_by, groups))


def _held_by(group: Group) -> tuple[int, Tensor | None]:
    """Positions the group holds once everything known is fed, and the encoder states that it looks
    at; a prompt is shared by all of its sequences."""
    request = group.request
    generated = sum(s.generated for s in group.live)
    prompts = [request.prompt, *request.companions]
    own = sum(prompt.length for prompt in prompts) + len(prompts) * generated
    return own, request.prompt.encoder


def _require(what: str, needed: int, limit: int, name: str) -> None:
    if needed > limit:
        raise OversizeError(
            f"the request needs more {what} than there are",
            wanted=f"at most {limit}",
            got=needed,
            do=f"Raise {name} or lower num_beams / num_return_sequences / num_drafts",
        )
