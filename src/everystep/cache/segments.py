"""Immutable stretches of rows, shared by reference count.

Segments lie in slots of a pool of their own and stay where they are; a free slot is used again,
lowest first, so that the segments in use are close together. A row refers to a segment by a link,
which may use only its first positions: that is how a row is truncated into a segment.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from everystep.cache.pool import Counts, Pool
from everystep.nn.network import KvShape


@dataclass(slots=True, eq=False)
class Segment:
    """`length` positions in a slot, and by how many rows they are referred to."""

    slot: int
    length: int
    references: int = 1


class Link(NamedTuple):
    """The first `length` positions of a segment."""

    segment: Segment
    length: int


class Shelf:
    """Where segments lie."""

    def __init__(
        self, shape: KvShape, dtype: torch.dtype, device: torch.device, counts: Counts
    ) -> None:
        self.pool = Pool(shape, dtype, device, counts)
        self._free: list[int] = []
        self._ever = 0

    @property
    def held(self) -> int:
        """How many segments somebody refers to."""
        return self._ever - len(self._free)

    def store(self, values: Tensor) -> Segment:
        """A segment that holds a copy of (L, 2, K, length, D), with one reference."""
        slot = self._take(values.shape[3])
        self.pool.fill(slot, values)
        return Segment(slot, values.shape[3])

    def retain(self, segment: Segment) -> Segment:
        """One more row refers to the segment."""
        segment.references += 1
        return segment

    def release(self, segment: Segment) -> None:
        """One row less refers to it; without any it is gone."""
        segment.references -= 1
        if segment.references == 0:
            heapq.heappush(self._free, segment.slot)

    def clear(self) -> None:
        """Nobody refers to any segment."""
        self._free.clear()
        self._ever = 0

    def _take(self, length: int) -> int:
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            slot = self._ever
            self._ever += 1
        self.pool.reserve(slot + 1, length)
        self.pool.wipe(slot)
        return slot
