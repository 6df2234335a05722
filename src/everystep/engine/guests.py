"""Guests of the step: drafters, amateurs and hooks, which only some requests need.

Before the feed, guests add to the feeds of the sequences that they serve: ids that may follow,
what another model says, further inputs. The rest of the step reads what was added and asks nobody
where it came from. A guest is made when a request first needs it, so a plain step has none.

Groups are served together; where that fails, each alone, so that an error ends its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from everystep.engine.counts import Counts
from everystep.engine.feed import Feeds, Grant
from everystep.errors import NOBODYS
from everystep.executors.base import Executor
from everystep.types import Group, Request

T = TypeVar("T")
_MOST_IDLE = 32
Failed = list[tuple[Group, Exception]]
"""Groups that cannot go on, and why."""
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """The parts of an engine that guests may use; `clock` gives seconds of the monotonic clock."""

    executor: Executor
    counts: Counts
    clock: Clock


class Guest(Protocol):
    """A part of the step that only some requests need."""

    def open(self, request: Request) -> None:
        """Get ready for a request that needs it; RequestError if it cannot be served."""

    def before(self, grants: list[Grant], feeds: Feeds, groups: list[Group]) -> Failed:
        """Add to the feeds of this step, and return the groups that cannot be served.

        `groups`: all that are not over, whether they take part or not.
        """

    def after(self, feeds: Feeds) -> None:
        """Note what the step has cost and gained, which is over now."""

    def restart(self) -> None:
        """Drop everything held for sequences; it is made again from the ids."""

    def held(self) -> int:
        """Count the cache rows that sequences hold with it."""


@dataclass(frozen=True, slots=True, eq=False)
class GuestKind:
    """A kind of guest: the requests that need it, and its maker."""

    is_needed: Callable[[Request], bool]
    make: Callable[[Host], Guest]


@dataclass(slots=True, eq=False)
class Guests:
    """The guests of an engine, at most one of each kind, asked in the order of the kinds.

    `present`: those that a request has needed, in that order.
    """

    host: Host
    kinds: tuple[GuestKind, ...]
    present: dict[GuestKind, Guest] = field(default_factory=dict)

    def open(self, request: Request) -> None:
        """Let the guests that a request needs get ready for it, and make those that are absent."""
        for kind in self.kinds:
            if kind.is_needed(request):
                guest = self.present.get(kind) or kind.make(self.host)
                guest.open(request)
                if kind not in self.present:
                    present = {**self.present, kind: guest}
                    self.present = {one: present[one] for one in self.kinds if one in present}

    def before(self, grants: list[Grant], feeds: Feeds, groups: list[Group]) -> Failed:
        """Add to the feeds of this step; no further guest is asked where one fails for a group."""
        for guest in self.present.values():
            if failed := guest.before(grants, feeds, groups):
                return failed
        return []

    def after(self, feeds: Feeds) -> None:
        """Let all guests learn of the step that is over."""
        for guest in self.present.values():
            guest.after(feeds)

    def restart(self) -> None:
        """Drop everything that guests hold for sequences."""
        for guest in self.present.values():
            guest.restart()

    def held(self) -> int:
        """Count the cache rows that sequences hold with guests."""
        return sum([guest.held() for guest in self.present.values()])

    def find(self, kind: type[T]) -> T | None:
        """Return the guest of this class, None where no request has needed it."""
        return next((one for one in self.present.values() if isinstance(one, kind)), None)


# --- for guests that serve groups with models or sources of their own -----------------------------


def together_or_apart(
    groups: list[Group], serve: Callable[[list[Group]], None], undo: Callable[[], None]
) -> Failed:
    """Serve all groups at once or, if that fails, one at a time; return those that fail alone.

    `undo` drops what a failure may have left.
    """
    try:
        serve(groups)
    except NOBODYS:
        raise
    except Exception as error:
        undo()
        if len(groups) == 1:
            return [(groups[0], error)]
        return [one for group in groups for one in together_or_apart([group], serve, undo)]
    return []


class Holding(Protocol):
    """A server of groups that may hold cache rows for them."""

    def held(self) -> int: ...


def unused(at_work: Mapping[T, Holding], used: Iterable[T | None]) -> list[T]:
    """Return the servers to close, because many are at work and nobody uses these.

    One that is closed holds no rows, so no sequence remembers one of it.
    """
    if len(at_work) <= _MOST_IDLE:
        return []
    asked = set(used)
    return [one for one, serving in at_work.items() if one not in asked and not serving.held()]
