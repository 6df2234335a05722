"""Which pages hold the states of which row, where layers are recurrent.

A page holds the states of all layers after one position of a row, and is never written again while
a row holds it, so forks share it. A row has the page for its next position already, so that the
library can begin with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from everystep.cache.states import cut_marks, kept_steps
from everystep.errors import InvariantError
from everystep.executors.native.page_tables import PagePool


class StatePage(NamedTuple):
    """The page of the states after the first `position` positions of a row."""

    position: int
    page: int


class KeptStates(NamedTuple):
    """Pages of a step, as `cpp/model.h` describes them."""

    before: np.ndarray
    kept: np.ndarray
    after: np.ndarray
    next: np.ndarray


@dataclass(slots=True)
class StateRows:
    """All rows of an executor whose layers keep states.

    A row can be cut back to 0, and to the positions of which it holds the states: those whose
    logits its last feed wanted, and the one before them.
    """

    pool: PagePool = field(default_factory=lambda: PagePool(least=4))  # they may be megabytes
    _marks: dict[int, tuple[StatePage, ...]] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)  # row -> page for its next position

    def lengths(self) -> dict[int, int]:
        """Return how many positions each row holds."""
        return {row: self.length(row) for row in self._marks}

    def length(self, row: int) -> int:
        """Return how many positions a row holds; raise InvariantError if it is not allocated."""
        if row not in self._marks:
            raise InvariantError(f"row {row} is not allocated")
        marks = self._marks[row]
        return marks[-1].position if marks else 0

    def allocate(self, row: int) -> None:
        """Add an empty row."""
        if row in self._marks:
            raise InvariantError(f"row {row} is allocated twice")
        self._marks[row] = ()

    def fork(self, row: int, source: int) -> None:
        """Add a row that holds what `source` holds."""
        self.length(source)
        self.allocate(row)
        self.pool.share(_pages(self._marks[source]))
        self._marks[row] = self._marks[source]
        self.pool.counts.forks += 1

    def truncate(self, row: int, length: int) -> None:
        """Cut the row to its first `length` positions.

        Raise InvariantError where it holds no states of just these.
        """
        self.length(row)
        self._keep(row, cut_marks(self._marks[row], length))

    def free(self, row: int) -> None:
        """Remove the row."""
        self.truncate(row, 0)
        if row in self._next:
            self.pool.release(np.array([self._next.pop(row)]))
        del self._marks[row]

    def extend(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        wanted: Sequence[int],
    ) -> KeptStates:
        """Let rows of `starts` positions hold `counts` more; return where states lie and will lie.

        Each row may be cut back by as many positions as are `wanted`.
        """
        before, kept, after = [], [], []
        dropped: list[StatePage] = []
        for row, start, count, want in zip(rows, starts, counts, wanted, strict=True):
            if self.length(row) != start:
                raise InvariantError(f"row {row} is fed at {start}", wanted=self.length(row))
            marks = self._marks[row]
            steps = kept_steps(count, want)
            own = tuple(StatePage(start + step, self._page_for(row)) for step in steps)
            self._next[row] = self.pool.take()
            before.append(marks[-1].page if marks else -1)
            kept.append(len(own))
            after += [mark.page for mark in own]
            held = marks[-1:] if want >= count else ()
            self._marks[row] = (*held, *own)
            dropped += marks[: len(marks) - len(held)]
        # What the step begins with is not to be written in the same step.
        for mark in dropped:
            self.pool.release(_pages((mark,)))
        after_next = np.array([self._next[row] for row in rows], np.int32)
        return KeptStates(
            np.array(before, np.int32),
            np.array(kept, np.int64),
            np.array(after, np.int32),
            after_next,
        )

    def restore(self, row: int, length: int) -> None:
        """Give the empty row `length` positions, and a page for their states."""
        self._marks[row] = (StatePage(length, self.pool.take()),)

    def page(self, row: int) -> int | None:
        """Return the page of a row's states, None where it is empty."""
        return self._marks[row][-1].page if self.length(row) else None

    def recount(self) -> None:
        """Count every page again as free or held, whatever was cut short by an interrupt.

        What rows hold is as it was left, and is only good for being freed.
        """
        spare = (np.array([page]) for page in self._next.values())
        self.pool.recount([*map(_pages, self._marks.values()), *spare])

    def _page_for(self, row: int) -> int:
        """Return the page that the row has for its next position, or another one."""
        page = self._next.pop(row, None)
        return self.pool.take() if page is None else page

    def _keep(self, row: int, kept: tuple[StatePage, ...]) -> None:
        gone = self._marks[row][len(kept) :]
        self._marks[row] = kept
        self.pool.release(_pages(gone))


def _pages(marks: Iterable[StatePage]) -> np.ndarray:
    """Return (n,) the pages of these states."""
    return np.array([mark.page for mark in marks], np.int64)
