"""Which pages hold which row: a table of page numbers per row, and how many rows share each.

A page holds 16 positions of all layers. A fork shares every page of its source; the first that
writes into a shared page gets a copy of its own. So a prompt is stored once however many rows
continue it, and nothing ever moves. The pages themselves are memory of the library.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from everystep.errors import InvariantError, message

PAGE = 16


@dataclass(slots=True)
class PageCounts:
    """What was done so far: `copies` of pages, and the most that were in use at once."""

    forks: int = 0
    copies: int = 0
    most_pages: int = 0


@dataclass(slots=True)
class _Row:
    """How many of the row's page numbers count, and the positions held."""

    used: int = 0
    length: int = 0


@dataclass(slots=True)
class PagedRows:
    """All rows of an executor.

    `table`: (rows, n) int32, the page numbers of row r in order in line r, as the library reads
    them; it is replaced when it grows.
    """

    counts: PageCounts = field(default_factory=PageCounts)
    table: np.ndarray = field(default_factory=lambda: np.zeros((8, 8), np.int32))
    _rows: dict[int, _Row] = field(default_factory=dict)
    _shares: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    _free: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many pages must exist."""
        return len(self._shares)

    @property
    def in_use(self) -> int:
        """How many pages some row holds."""
        return self.total - len(self._free)

    def lengths(self) -> dict[int, int]:
        """Row -> positions held."""
        return {number: row.length for number, row in self._rows.items()}

    def length(self, row: int) -> int:
        """Positions held by a row; InvariantError if it is not allocated."""
        return self._row(row).length

    def allocate(self, row: int) -> None:
        """The row exists and is empty."""
        self._make_line(row, 0)
        self._rows[row] = _Row()

    def fork(self, row: int, source: int) -> None:
        """The row holds what `source` holds."""
        parent = self._row(source)
        self._make_line(row, parent.used)
        shared = self.table[source, : parent.used]
        self.table[row, : parent.used] = shared
        self._rows[row] = _Row(parent.used, parent.length)
        self._shares[shared] += 1
        self.counts.forks += 1

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions."""
        held = self._row(row)
        if not 0 <= length <= held.length:
            raise InvariantError(message(f"row {row} cannot be cut", got=length))
        kept = -(-length // PAGE)
        if kept < held.used:
            self._release(self.table[row, kept : held.used])
        held.used, held.length = kept, length

    def free(self, row: int) -> None:
        """The row is gone."""
        self.truncate(row, 0)
        del self._rows[row]

    def extend(self, row: int, count: int) -> tuple[int, int] | None:
        """The row has pages of its own for `count` more positions, and holds them from now on.

        Returns a page to be copied and where to, if its last page was shared.
        """
        held = self._row(row)
        copied = self._own_last_page(row, held) if held.length % PAGE else None
        held.length += count
        while held.used * PAGE < held.length:
            self._make_room(row, held.used)
            self.table[row, held.used] = self._take()
            held.used += 1
        return copied

    def has_room(self, row: int) -> bool:
        """Whether a row that was extended has place for one more position without another page."""
        return self._row(row).length % PAGE > 0

    def pages(self, row: int) -> np.ndarray:
        """(n,) int32 page numbers of a row."""
        return self.table[row, : self._row(row).used]

    def recount(self) -> None:
        """Every page is free or counted again, whatever was cut short by an interrupt.

        What rows hold is as it was left, and is only good for being freed.
        """
        shares = np.zeros_like(self._shares)
        for row, held in self._rows.items():
            shares += np.bincount(self.table[row, : held.used], minlength=len(shares))
        self._shares = shares
        self._free = np.flatnonzero(shares == 0)[::-1].tolist()

    def _own_last_page(self, row: int, held: _Row) -> tuple[int, int] | None:
        """The last page is the row's alone; returns what to copy and where to, if it was shared."""
        shared = int(self.table[row, held.used - 1])
        if self._shares[shared] == 1:
            return None
        self._shares[shared] -= 1
        self.table[row, held.used - 1] = own = self._take()
        self.counts.copies += 1
        return shared, own

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            raise InvariantError(message(f"row {row} is not allocated"))
        return self._rows[row]

    def _make_line(self, row: int, pages: int) -> None:
        """There is a line for a new row, with places for so many pages."""
        if row in self._rows:
            raise InvariantError(message(f"row {row} is allocated twice"))
        self._make_room(row, pages)

    def _make_room(self, row: int, page: int) -> None:
        """The table has a place for page number `page` of the row."""
        rows, pages = self.table.shape
        if row < rows and page < pages:
            return
        size = (max(rows, 2 * row) if row >= rows else rows, 2 * page if page >= pages else pages)
        grown = np.zeros(size, np.int32)
        grown[:rows, :pages] = self.table
        self.table = grown

    def _take(self) -> int:
        if not self._free:
            held = len(self._shares)
            grown = max(64, 2 * held)
            self._shares = np.concatenate([self._shares, np.zeros(grown - held, np.int32)])
            # Lowest first, so that pages in use lie close together.
            self._free = list(range(grown - 1, held - 1, -1))
        page = self._free.pop()
        self._shares[page] = 1
        self.counts.most_pages = max(self.counts.most_pages, self.in_use)
        return page

    def _release(self, pages: np.ndarray) -> None:
        self._shares[pages] -= 1
        self._free += pages[self._shares[pages] == 0].tolist()
