"""Groups are served together; where that fails, each alone, so that an error ends its own group."""

from __future__ import annotations

from collections.abc import Callable

from everystep.errors import NOBODYS
from everystep.types import Group

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
