"""What serves groups beside the engine's own model: drafters and amateurs.

Groups are served together; where that fails, each alone, so that an error ends its own group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from everystep.errors import NOBODYS
from everystep.types import Group

T = TypeVar("T")
_MOST_IDLE = 32
Failed = list[tuple[Group, Exception]]
"""Groups that cannot go on, and why."""


def together_or_apart(
    groups: list[Group], serve: Callable[[list[Group]], None], undo: Callable[[], None]
) -> Failed:
    """Serves all groups at once or, if that fails, one at a time; returns those that fail alone.

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
    """What serves groups, and may hold cache rows for them."""

    def held(self) -> int: ...


def unused(at_work: Mapping[T, Holding], used: Iterable[T | None]) -> list[T]:
    """What is to be closed, because many are at work and nobody uses these.

    What is closed holds no rows, so no sequence remembers one of it.
    """
    if len(at_work) <= _MOST_IDLE:
        return []
    asked = set(used)
    return [one for one, serving in at_work.items() if one not in asked and not serving.held()]
