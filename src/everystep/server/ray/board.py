"""How replicas are, by their own account. Nothing here needs Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec

from everystep.server.messages import ReplicaState

log = logging.getLogger("everystep.server")

_AT_ONCE = 8
"""Replicas that are asked at once."""
_MOST_TRIED = 32
"""Sessions of a look that nobody knows yet, at most."""
_FORGOTTEN = 15.0
"""Seconds after which a replica that says nothing is left out."""


@dataclass(frozen=True, slots=True)
class _Account:
    """A state that a replica gave: by the session that reached it, and when."""

    session: str
    state: ReplicaState
    moment: float


class ReplicaBoard:
    """The states of replicas that can be reached by sessions alone.

    Which replica has a session follows from a hash, so sessions are tried until as many replicas
    have answered as there are. Each is asked again by the session that reached it last.

    `ask`: returns the state of the replica that has a session. `patience`: the seconds that one has
    for it; a replica that is full answers nobody.
    """

    def __init__(
        self,
        ask: Callable[[str], Awaitable[ReplicaState]],
        patience: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._patience, self._clock = ask, patience, clock
        self._told: dict[tuple[str, int], _Account] = {}
        self._tried = 0
        self.states: list[ReplicaState] = []

    async def look(self, count: int) -> None:
        """Ask the replicas, of which there are so many, how they are."""
        answered = await self._heard(one.session for one in self._told.values())
        if (missing := count - len(answered)) > 0:
            tries = range(self._tried, self._tried + min(4 * missing, _MOST_TRIED))
            self._tried = tries.stop
            answered |= await self._heard(f"state {number}" for number in tries)
        now = self._clock()
        kept = {key: self._told[key] for key in answered}
        if len(answered) < count:
            kept |= {k: one for k, one in self._told.items() if now - one.moment < _FORGOTTEN}
        self._told = kept
        self.states = [
            msgspec.structs.replace(one.state, silent_seconds=max(0.0, now - one.moment))
            for _, one in sorted(kept.items())
        ]

    async def _heard(self, sessions: Iterable[str]) -> set[tuple[str, int]]:
        """Ask the replicas that have these sessions; return which of them have answered."""
        free = asyncio.Semaphore(_AT_ONCE)
        answered: set[tuple[str, int]] = set()

        async def hear(session: str) -> None:
            async with free:
                try:
                    state = await asyncio.wait_for(self._ask(session), self._patience)
                except Exception as error:  # another one is found, or it is asked again
                    log.debug("a replica does not say how it is: %s", error)
                    return
            key = state.node, state.process
            self._told[key] = _Account(session, state, self._clock())
            answered.add(key)

        await asyncio.gather(*map(hear, [*sessions]))
        return answered
