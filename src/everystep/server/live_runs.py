"""Runs as the front knows them: whose they are, how many there may be, and for how long."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from everystep.errors import CapacityError, RequestError
from everystep.server.asking import Addressee


class UnknownRunError(RequestError):
    """The caller has no open run of this name."""


class TooManyRunsError(CapacityError):
    """A run beyond those that may be open at once."""


class BusyRunError(RequestError):
    """Something is being done to the run already."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The runs of a key and of all keys, and the seconds that one may be left alone."""

    per_key: int = 8
    total: int = 32
    idle_seconds: float = 600.0


@dataclass(slots=True, eq=False)
class LiveRun:
    """An open run. `engine`: which engine has it, as engines are started one after another."""

    owner: str | None
    to: Addressee
    engine: int
    used: float
    busy: bool = False
    id: str = field(default_factory=lambda: f"run_{secrets.token_hex(12)}")


class LiveRuns:
    """The open runs of a server. `engine`: tells how many engines there were before this one."""

    def __init__(
        self,
        limits: RunLimits,
        engine: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._engine, self._clock = limits, engine, clock
        self._runs: dict[str, LiveRun] = {}

    def add(self, owner: str | None, to: Addressee) -> LiveRun:
        """Return a new run of this caller's; TooManyRunsError if there are too many."""
        self._forget_lost()
        own = sum(one.owner == owner for one in self._runs.values())
        most = self._limits.per_key if own >= self._limits.per_key else self._limits.total
        if own >= self._limits.per_key or len(self._runs) >= self._limits.total:
            raise TooManyRunsError(
                "too many runs are open",
                wanted=f"at most {most}",
                do="End one with DELETE, or save it and resume it later",
            )
        one = LiveRun(owner, to, self._engine(), self._clock(), busy=True)
        self._runs[one.id] = one
        return one

    def find(self, owner: str | None, id: str) -> LiveRun:
        """Return the run of this name; UnknownRunError unless the caller has it."""
        self._forget_lost()
        one = self._runs.get(id)
        if one is None or one.owner != owner:
            raise UnknownRunError(
                f"there is no open run {id[:80]!r}",
                do="Open it again: a run ends when it is left alone, and with its engine",
            )
        return one

    def listed(self, owner: str | None) -> list[LiveRun]:
        """Return the caller's runs."""
        self._forget_lost()
        return [one for one in self._runs.values() if one.owner == owner]

    @contextmanager
    def used(self, one: LiveRun) -> Iterator[None]:
        """Use a run alone while the block lasts; BusyRunError if somebody does."""
        if one.busy:
            raise BusyRunError("something is being done to the run", do="Wait for its answer")
        one.busy = True
        try:
            yield
        finally:
            self.free(one)

    def free(self, one: LiveRun) -> None:
        """Let a run be used again."""
        one.busy, one.used = False, self._clock()

    def touch(self, one: LiveRun) -> None:
        """Note that somebody looks at a run."""
        one.used = self._clock()

    def drop(self, one: LiveRun) -> None:
        """Know the run no longer."""
        self._runs.pop(one.id, None)

    def expired(self) -> list[LiveRun]:
        """Return the runs that were left alone for too long, which are known no longer."""
        self._forget_lost()
        late = self._clock() - self._limits.idle_seconds
        found = [one for one in self._runs.values() if not one.busy and one.used < late]
        for one in found:
            self.drop(one)
        return found

    def _forget_lost(self) -> None:
        """Forget runs whose engine has died."""
        now = self._engine()
        for one in [one for one in self._runs.values() if one.engine != now]:
            self.drop(one)
