"""Which pages hold which row: a table of page numbers per row, and how many rows share each.

A page holds 16 positions of all layers. A fork shares every page of its source; the first that
writes into a shared page gets a copy of its own. So a prompt is stored once however many rows
continue it, and nothing ever moves. A row that fills its last page has the next one already, so
that the library can begin with its next position. The pages themselves are memory of the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from everystep.errors import InvariantError

PAGE = 16


@dataclass(slots=True)
class PageCounts:
    """The work done so far: `copies` of pages, and the most that were in use at once."""

    forks: int = 0
    copies: int = 0
    most_pages: int = 0


@dataclass(slots=True)
class PagePool:
    """The pages: which are free, and how many rows share each of the others.

    `least`: how many there are as soon as there is one.
    """

    least: int = 64
    counts: PageCounts = field(default_factory=PageCounts)
    _shares: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    _free: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of pages that must exist."""
        return len(self._shares)

    @property
    def in_use(self) -> int:
        """The number of pages that some row holds."""
        return self.total - len(self._free)

    def take(self) -> int:
        """Return a page that was free, for one row."""
        if not self._free:
            held = len(self._shares)
            grown = max(self.least, 2 * held)
            self._shares = np.concatenate([self._shares, np.zeros(grown - held, np.int32)])
            # Lowest first, so that pages in use lie close together.
            self._free = list(range(grown - 1, held - 1, -1))
        page = self._free.pop()
        self._shares[page] = 1
        self.counts.most_pages = max(self.counts.most_pages, self.in_use)
        return page

    def share(self, pages: np.ndarray) -> None:
        """Count one more row that holds each of these pages."""
        self._shares[pages] += 1

    def release(self, pages: np.ndarray) -> None:
        """Count one row less that holds each of these pages."""
        self._shares[pages] -= 1
        self._free += pages[self._shares[pages] == 0].tolist()

    def is_shared(self, page: int) -> bool:
        """Return whether several rows hold a page."""
        return bool(self._shares[page] > 1)

    def recount(self, held: Iterable[np.ndarray]) -> None:
        """Count again: rows hold these pages, each those of one array, and all others are free."""
        shares = np.zeros_like(self._shares)
        for pages in held:
            shares += np.bincount(pages, minlength=len(shares))
        self._shares = shares
        self._free = np.flatnonzero(shares == 0)[::-1].tolist()


@dataclass(slots=True)
class PagedRows:
    """All rows of an executor whose layers keep keys and values.

    `table`: (rows, n) int32, the page numbers of row r in order in line r, as the library reads
    them; it is replaced when it grows.
    """

    pool: PagePool = field(default_factory=PagePool)
    table: np.ndarray = field(default_factory=lambda: np.zeros((8, 8), np.int32))
    _lengths: dict[int, int] = field(default_factory=dict)
    _held: dict[int, int] = field(default_factory=dict)  # row -> pages, one more than used at most

    def lengths(self) -> dict[int, int]:
        """Return how many positions each row holds."""
        return self._lengths.copy()

    def length(self, row: int) -> int:
        """Return how many positions a row holds; raise InvariantError if it is not allocated."""
        if row not in self._lengths:
            raise InvariantError(f"row {row} is not allocated")
        return self._lengths[row]

    def allocate(self, row: int) -> None:
        """Add an empty row."""
        if row in self._lengths:
            raise InvariantError(f"row {row} is allocated twice")
        self._make_room(row, 0)
        self._lengths[row] = self._held[row] = 0

    def fork(self, row: int, source: int) -> None:
        """Add a row that holds what `source` holds."""
        shared = self.pages(source)
        self.allocate(row)
        self.table[row, : len(shared)] = shared
        self._lengths[row], self._held[row] = self._lengths[source], len(shared)
        self.pool.share(shared)
        self.pool.counts.forks += 1

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to its first `length` positions."""
        if not 0 <= length <= self.length(row):
            raise InvariantError(f"row {row} cannot be cut", got=length)
        kept = _pages_of(length)
        self.pool.release(self.table[row, kept : self._held[row]])
        self._lengths[row], self._held[row] = length, kept

    def free(self, row: int) -> None:
        """Remove the row."""
        self.truncate(row, 0)
        del self._lengths[row], self._held[row]

    def extend(
        self, rows: Iterable[int], starts: Iterable[int], counts: Iterable[int]
    ) -> tuple[list[tuple[int, int]], int]:
        """Give rows of `starts` positions pages of their own for `counts` more and what follows.

        The rows hold these positions then. Return which pages are to be copied, and where to; and
        the most positions that a row holds.
        """
        copied, longest = [], 0
        for row, start, count in zip(rows, starts, counts, strict=True):
            if self._lengths.get(row) != start:
                held = self.length(row)
                raise InvariantError(f"row {row} is fed at {start}", wanted=held)
            end, last = start + count, start // PAGE
            if start % PAGE and self.pool.is_shared(self.table[row, last]):
                copied.append(self._own_page(row, last))
            for page in range(self._held[row], end // PAGE + 1):
                self._make_room(row, page)
                self.table[row, page] = self.pool.take()
                # After it, so that at an interrupt no page is counted that was not taken.
                self._held[row] = page + 1
            self._lengths[row] = end
            longest = max(longest, end)
        return copied, longest

    def pages(self, row: int) -> np.ndarray:
        """Return (n,) int32 page numbers of a row."""
        return self.table[row, : _pages_of(self.length(row))]

    def recount(self) -> None:
        """Count every page again as free or held, whatever was cut short by an interrupt.

        What rows hold is as it was left, and is only good for being freed.
        """
        self.pool.recount(self.table[row, :held] for row, held in self._held.items())

    def _own_page(self, row: int, page: int) -> tuple[int, int]:
        """Make a shared page the row's alone; return what to copy, and where to."""
        shared = self.table[row, page : page + 1].copy()
        self.pool.release(shared)
        self.table[row, page] = own = self.pool.take()
        self.pool.counts.copies += 1
        return int(shared[0]), own

    def _make_room(self, row: int, page: int) -> None:
        """Make a place in the table for page number `page` of the row."""
        rows, pages = self.table.shape
        if row < rows and page < pages:
            return
        size = (max(rows, 2 * row) if row >= rows else rows, 2 * page if page >= pages else pages)
        grown = np.zeros(size, np.int32)
        grown[:rows, :pages] = self.table
        self.table = grown


def _pages_of(length: int) -> int:
    """Return how many pages so many positions take."""
    return -(-length // PAGE)
