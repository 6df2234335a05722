"""What engines have counted, added up over all that there were."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from everystep.server.messages import EngineTally

_COUNTERS = ("preemptions", "drafted", "accepted")


class Tallies:
    """The tallies of each model: its counters go on where an engine begins again at nothing."""

    def __init__(self) -> None:
        self._before: dict[str, EngineTally] = {}  # of engines that are gone
        self._last: dict[str, EngineTally] = {}

    def hear(self, told: Mapping[str, EngineTally]) -> None:
        """Take in what an engine says now; a model that it does not mention is not used there."""
        for model, last in self._last.items():
            now = told.get(model)
            if now is None or any(getattr(now, one) < getattr(last, one) for one in _COUNTERS):
                before = self._before.get(model, EngineTally())
                self._before[model] = _sum(before, last)
        self._last = {**dict.fromkeys(self._before, EngineTally()), **told}

    def forget_engine(self) -> None:
        """Take note that the engine is gone, with what it had counted."""
        self.hear({})

    def shown(self) -> dict[str, EngineTally]:
        """Return the tally of each model, until now."""
        return {
            model: _sum(self._before.get(model, EngineTally()), last)
            for model, last in self._last.items()
        }


def _sum(before: EngineTally, last: EngineTally) -> EngineTally:
    """Return the sum of counters, and the usage of the last."""
    counters = {one: getattr(before, one) + getattr(last, one) for one in _COUNTERS}
    return msgspec.structs.replace(last, **counters)
