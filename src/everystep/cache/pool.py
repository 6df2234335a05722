"""Storage of keys and values: lines of equal capacity in one tensor, (L, 2, lines, K, capacity, D).

All layers of a line are copied by one operation, and the first lines of a layer are one view for
attention. Capacity and lines grow by doubling; on the CPU a page of it takes memory only when it is
first written. Memory starts as zeros and a line is wiped before it is used again, because attention
multiplies what it masks by zero, and zero times NaN is NaN.

Segments are immutable stretches of rows, shared by reference count. They lie in lines of a pool of
their own and stay where they are; a free line is used again, lowest first, so that the segments in
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

import numpy as np
import torch
from torch import Tensor

from everystep.cache.formats import Codes
from everystep.devices import on_device

_LEAST_CAPACITY = 64
_PAGED_BYTES = 1 << 20


@dataclass(slots=True)
class CacheCounts:
    """The deeds of the cache so far; deterministic, so that tests can hold it to account.

    `forks`: rows made from others. `tail_copies`: tails copied for a fork. `freezes`: tails that
    became segments. `moves`: rows moved to keep the prefix dense. `allocations`: of memory.
    """

    forks: int = 0
    tail_copies: int = 0
    freezes: int = 0
    moves: int = 0
    allocations: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """`length` positions in a line, and by how many rows they are referred to.

    A segment of affine codes lies in no line: `codes` has the codes of keys and of values, layer by
    layer.
    """

    line: int
    length: int
    references: int = 1
    codes: list[tuple[Codes, Codes]] | None = None


class Link(NamedTuple):
    """The first `length` positions of a segment."""

    segment: Segment
    length: int


class Pool:
    """Lines of keys and values that grow as needed; `shape`: (L, K, D) of one position.

    Rows choose the lines of their tails; a segment takes the first line that is free.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        counts: CacheCounts,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._counts = counts
        self._data = self._empty(0, 0)
        self._used: list[int] = []
        self._free: list[int] = []
        self._ever = 0

    @property
    def capacity(self) -> int:
        """The number of positions that fit into a line."""
        return self._data.shape[4]

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return self._data.nbytes

    def layer(self, index: int) -> Tensor:
        """Return (2, lines, K, capacity, D), a view."""
        return self._data[index]

    def read(self, line: int, length: int) -> Tensor:
        """Return (L, 2, K, length, D), a view."""
        return self._data[:, :, line, :, :length]

    def reserve(self, lines: int, capacity: int) -> None:
        """Make room for at least so many lines of at least so many positions."""
        held = self._data
        if lines <= held.shape[2] and capacity <= self.capacity:
            return
        if capacity > self.capacity:
            # Room for the tokens that follow, or a prompt of 2^n would be copied at once.
            capacity = _doubled(self.capacity, capacity + _LEAST_CAPACITY, _LEAST_CAPACITY)
        count = _doubled(held.shape[2], lines, 1)
        self._data = self._empty(count, max(capacity, self.capacity))
        for line, used in enumerate(self._used):
            self._data[:, :, line, :, :used] = held[:, :, line, :, :used]
        self._used += [0] * (count - len(self._used))
        self._counts.allocations += 1

    def wipe(self, line: int) -> None:
        """Fill the line with zeros."""
        if self._used[line]:
            self.read(line, self._used[line]).zero_()
            self._used[line] = 0

    def touch(self, line: int, length: int) -> None:
        """Note that the first `length` positions of the line will be written."""
        self._used[line] = max(self._used[line], length)

    def fill(self, line: int, values: Tensor) -> None:
        """Write (L, 2, K, length, D) at the start of a wiped line."""
        self.touch(line, values.shape[3])
        self.read(line, values.shape[3]).copy_(values)

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of all layers, line by line, in one operation.

        No target may be among the sources.
        """
        for source, target in zip(sources, targets, strict=True):
            self.touch(target, min(length, self._used[source]))
        if length:
            read, written = (on_device(self._device, np.array(one)) for one in (sources, targets))
            self._data[:, :, written, :, :length] = self._data[:, :, read, :, :length]

    def shift(self, line: int, by: int, length: int) -> None:
        """Drop the first `by` of `length` positions and move the others into their place."""
        kept = self._data[:, :, line, :, by:length].clone()
        self._data[:, :, line, :, : length - by] = kept

    # --- segments ---------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """The number of segments that are referred to."""
        return self._ever - len(self._free)

    def store(self, values: Tensor) -> Segment:
        """Return a segment that holds a copy of (L, 2, K, length, D), with one reference."""
        length = values.shape[3]
        if self._free:
            line = heapq.heappop(self._free)
        else:
            line = self._ever
            self._ever += 1
        self.reserve(line + 1, length)
        self.wipe(line)
        self.fill(line, values)
        return Segment(line, length)

    def release(self, segment: Segment) -> None:
        """Count one row less that refers to the segment; without rows it is gone."""
        segment.references -= 1
        if segment.references == 0 and segment.codes is None:
            heapq.heappush(self._free, segment.line)

    def _empty(self, lines: int, capacity: int) -> Tensor:
        layers, heads, dim = self._shape
        size = (layers, 2, lines, heads, capacity, dim)
        if self._device.type == "cpu":
            return _zero_pages(size, self._dtype)
        return torch.zeros(size, dtype=self._dtype, device=self._device)


def _zero_pages(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that the operating system provides page by page, as they are written."""
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
