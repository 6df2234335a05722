"""Storage of keys and values: slots of equal capacity in one tensor, (L, 2, slots, K, capacity, D).

All layers of a slot are copied by one operation, and the first slots of a layer are one view for
attention. Capacity and slots grow by doubling; on the CPU a page of it takes memory only when it is
first written. Memory starts as zeros and a slot is wiped before it is used again, because attention
multiplies what it masks by zero, and zero times NaN is NaN.

Segments are immutable stretches of rows, shared by reference count. They lie in slots of a pool of
their own and stay where they are; a free slot is used again, lowest first, so that the segments in
use are close together. A row refers to a segment by a link, which may use only its first positions:
that is how a row is truncated into a segment.
"""

from __future__ import annotations

import heapq
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from everystep.cache.formats import Codes

_LEAST_CAPACITY = 64
_PAGED_BYTES = 1 << 20


@dataclass(frozen=True)
class KvShape:
    """What one position costs: (L, 2, K, D)."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(slots=True)
class CacheCounts:
    """What the cache has done so far; deterministic, so that tests can hold it to account.

    `forks`: rows made from others. `tail_copies`: tails copied for a fork. `freezes`: tails that
    became segments. `moves`: rows moved to keep the prefix dense. `allocations`: of memory.
    """

    forks: int = 0
    tail_copies: int = 0
    freezes: int = 0
    moves: int = 0
    allocations: int = 0


class Pool:
    """Slots of keys and values that grow as needed."""

    def __init__(
        self, shape: KvShape, dtype: torch.dtype, device: torch.device, counts: CacheCounts
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._counts = counts
        self._data = self._empty(0, 0)
        self._used: list[int] = []

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self._data.shape[2]

    @property
    def capacity(self) -> int:
        """How many positions fit into a slot."""
        return self._data.shape[4]

    def layer(self, index: int) -> Tensor:
        """(2, slots, K, capacity, D), a view."""
        return self._data[index]

    def read(self, slot: int, length: int) -> Tensor:
        """(L, 2, K, length, D), a view."""
        return self._data[:, :, slot, :, :length]

    def reserve(self, slots: int, capacity: int) -> None:
        """There are at least so many slots of at least so many positions."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        held = self._data
        if capacity > self.capacity:
            # Room for the tokens that follow, or a prompt of 2^n would be copied at once.
            capacity = _doubled(self.capacity, capacity + _LEAST_CAPACITY, _LEAST_CAPACITY)
        self._data = self._empty(_doubled(self.slots, slots, 1), max(capacity, self.capacity))
        for slot, used in enumerate(self._used):
            self._data[:, :, slot, :, :used] = held[:, :, slot, :, :used]
        self._used += [0] * (self.slots - len(self._used))
        self._counts.allocations += 1

    def wipe(self, slot: int) -> None:
        """The slot holds zeros."""
        if self._used[slot]:
            self._data[:, :, slot, :, : self._used[slot]] = 0
            self._used[slot] = 0

    def touch(self, slot: int, length: int) -> None:
        """The first `length` positions of the slot will be written."""
        self._used[slot] = max(self._used[slot], length)

    def fill(self, slot: int, values: Tensor) -> None:
        """Writes (L, 2, K, length, D) at the start of a wiped slot."""
        self.touch(slot, values.shape[3])
        self._data[:, :, slot, :, : values.shape[3]] = values

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copies the first `length` positions of all layers, slot by slot, in one operation.

        No target may be among the sources.
        """
        if not sources or not length:
            return
        for source, target in zip(sources, targets, strict=True):
            self.touch(target, min(length, self._used[source]))
        if len(sources) == 1:
            self._data[:, :, targets[0], :, :length] = self._data[:, :, sources[0], :, :length]
        else:
            self._data[:, :, list(targets), :, :length] = self._data[
                :, :, list(sources), :, :length
            ]

    def shift(self, slot: int, by: int, length: int) -> None:
        """The first `by` of `length` positions are gone, and the others stand in their place."""
        kept = self._data[:, :, slot, :, by:length].clone()
        self._data[:, :, slot, :, : length - by] = kept

    def _empty(self, slots: int, capacity: int) -> Tensor:
        shape = self._shape
        size = (shape.layers, 2, slots, shape.kv_heads, capacity, shape.head_dim)
        if self._device.type == "cpu":
            return _zero_pages(size, self._dtype)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def _zero_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the operating system provides page by page, as they are written."""
    count = math.prod(size)
    if count * dtype.itemsize < _PAGED_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(size, dtype=dtype)
    pages = mmap.mmap(-1, count * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def _doubled(held: int, wanted: int, least: int) -> int:
    size = max(held, least)
    while size < wanted:
        size *= 2
    return size


@dataclass(slots=True, eq=False)
class Segment:
    """`length` positions in a slot, and by how many rows they are referred to.

    A segment of affine codes lies in no slot: `codes` has the codes of keys and of values, layer by
    layer.
    """

    slot: int
    length: int
    references: int = 1
    codes: list[tuple[Codes, Codes]] | None = None


class Link(NamedTuple):
    """The first `length` positions of a segment."""

    segment: Segment
    length: int


class Shelf:
    """Where segments lie."""

    def __init__(
        self, shape: KvShape, dtype: torch.dtype, device: torch.device, counts: CacheCounts
    ) -> None:
        self.pool = Pool(shape, dtype, device, counts)
        self._free: list[int] = []
        self._ever = 0

    @property
    def held(self) -> int:
        """How many segments are referred to."""
        return self._ever - len(self._free)

    def store(self, values: Tensor) -> Segment:
        """A segment that holds a copy of (L, 2, K, length, D), with one reference."""
        slot = self._take(values.shape[3])
        self.pool.fill(slot, values)
        return Segment(slot, values.shape[3])

    def retain(self, segment: Segment) -> Segment:
        """Counts one more row that refers to the segment."""
        segment.references += 1
        return segment

    def release(self, segment: Segment) -> None:
        """Counts one row less; a segment without rows is gone."""
        segment.references -= 1
        if segment.references == 0 and segment.codes is None:
            heapq.heappush(self._free, segment.slot)

    def clear(self) -> None:
        """Drops all segments."""
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
