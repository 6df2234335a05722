"""Seconds of calls, taken in turn so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from everystep.memory import memory_speed

T = TypeVar("T")
Calls = Iterable[Callable[[], object]]
"""Calls to be timed; what an iterator does to make one ready is not counted."""


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def medians(*series: Calls, warm_up: int = 1) -> list[float]:
    """Per series the median of its calls; the first `warm_up` of each are not counted."""
    taken = [[seconds(call) for call in turn] for turn in zip(*series, strict=True)]
    return [statistics.median(column) for column in zip(*taken[warm_up:], strict=True)]


def alternated(count: int, first: Callable[[], T], second: Callable[[], T]) -> list[tuple[T, T]]:
    """(count,) pairs of what both return; who begins changes with every pair."""
    pairs = []
    for turn in range(count):
        if turn % 2:
            other = second()
            pairs.append((first(), other))
        else:
            pairs.append((first(), second()))
    return pairs


class MemorySpeed:
    """The memory's speed beside what stands in the block: the mean of a measurement before and one
    after, because memory that is shared with other machines swings within minutes."""

    def __enter__(self) -> MemorySpeed:
        self._before = memory_speed()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes_per_s = (self._before + memory_speed()) / 2
