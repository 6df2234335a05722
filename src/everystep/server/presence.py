"""Models that the engine holds: one that nobody asks for is put away until somebody does.

The front decides it, since every ask passes there; the engine puts away and loads, and says so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

Whereabouts = Literal["loaded", "leaving", "away", "loading"]


@dataclass(frozen=True, slots=True)
class IdleLimits:
    """The seconds after which a model that nobody asks for is put away, None for never, and those
    that an ask waits at most for one that is loaded again."""

    idle_seconds: float | None = None
    load_seconds: float = 300.0


class Presence:
    """The whereabouts of an engine's models. `loads`: how often each was loaded again."""

    def __init__(
        self, limits: IdleLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits, self._clock = limits or IdleLimits(), clock
        self._where: dict[str, Whereabouts] = {}
        self._used: dict[str, float] = {}
        self.loads: Counter[str] = Counter()

    def meet(self, models: Iterable[str]) -> None:
        """Take note of a new engine, which holds them all."""
        self._where = dict.fromkeys(models, "loaded")
        self._used = dict.fromkeys(self._where, self._clock())

    def shown(self) -> dict[str, Whereabouts]:
        """Return where each model is."""
        return dict(self._where)

    def is_loaded(self, model: str) -> bool:
        """Return whether asks of a model may begin; one that the engine does not have is its own
        to refuse."""
        return self._where.get(model, "loaded") == "loaded"

    def calls_for(self, model: str) -> bool:
        """Return True if the engine is to load a model now, as somebody waits for it."""
        if self._where.get(model) != "away":
            return False
        self._where[model] = "loading"
        return True

    def idle(self, asked: Collection[str]) -> list[str]:
        """Return the models that are to be put away now. `asked`: those that somebody asks."""
        if (most := self.limits.idle_seconds) is None:
            return []
        now, found = self._clock(), list[str]()
        for model, where in self._where.items():
            if model in asked:
                self._used[model] = now
            elif where == "loaded" and now - self._used[model] >= most:
                self._where[model] = "leaving"
                found.append(model)
        return found

    def told(self, model: str, *, loaded: bool) -> None:
        """Take note of what the engine says of a model."""
        if loaded and self._where.get(model) == "loading":
            self.loads[model] += 1
        self._where[model] = "loaded" if loaded else "away"
        self._used[model] = self._clock()
