"""How many steps an engine takes for somebody who has left, counted inside of its host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from everystep.engine import audit
from everystep.errors import EverystepError
from everystep.server.host import EngineHost
from everystep.server.messages import AskMessage, Leave
from everystep.server.ray.replica import EngineReplica

Departure = tuple[int, str]
"""Steps that began after an engine heard that a reader had left and before its rows were free, and
what is wrong with the rows after that: nothing."""

DRAIN_SECONDS = 0.2
"""Of the replica whose requests have a longer deadline."""


@contextmanager
def departures() -> Iterator[list[Departure]]:
    """What becomes of those whose readers leave, of each host of this process, as it happens."""
    found: list[Departure] = []
    take = EngineHost._take

    def watched(host: EngineHost, message: AskMessage) -> None:
        if isinstance(message, Leave) and (under := host._under.get(message.id)) is not None:
            box, thread = under.one.box, under.one.thread
            assert box is not None and thread is not None, "a prompt is read before it is told of"
            driver = thread.driver
            begun, notice = driver._steps, box.notice

            def note() -> None:
                if box.over and box.notice is note:
                    box.notice = notice
                    try:
                        audit(driver.engine)
                        wrong = "" if not any(one.live for one in box.groups) else "it lives"
                    except EverystepError as error:
                        wrong = str(error)
                    found.append((driver._steps - begun, wrong))

            box.notice = note
        take(host, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineHost, "_take", watched)
        yield found


class WatchedReplica(EngineReplica):
    """A replica that tells of those who left."""

    async def __init__(self, *given: Any) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        self._watching = departures()
        self._departures = self._watching.__enter__()
        await super().__init__(*given)

    async def departures(self) -> list[Departure]:
        """What became of those who left until now."""
        return [*self._departures]
