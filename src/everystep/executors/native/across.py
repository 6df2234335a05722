"""Which encoder states the rows of an executor look at, and where their keys and values lie.

They are made once per tensor of states and shared by all rows that look at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from everystep.errors import InvariantError
from everystep.executors.native.page_tables import PagedRows


@dataclass(slots=True)
class StatesOfRows:
    """`pages`: has a line for each tensor of states that some row looks at."""

    pages: PagedRows = field(default_factory=PagedRows)
    _lines: dict[int, int] = field(default_factory=dict)  # row -> line
    _held: dict[int, Tensor] = field(default_factory=dict)  # line -> states
    _made: dict[int, int] = field(default_factory=dict)  # id of states -> line

    def look_at(self, row: int, states: Tensor) -> np.ndarray | None:
        """Let the row look at states (S, E).

        Return the pages of keys and values that are to be made, None where they are there.
        """
        if (line := self._made.get(id(states))) is not None:
            self._lines[row] = line
            return None
        held = self.pages.lengths()
        line = next(number for number in range(len(held) + 1) if number not in held)
        self.pages.allocate(line)
        self._held[line] = states
        self._lines[row] = line
        self.pages.extend([line], [0], [len(states)])
        self._made[id(states)] = line
        return self.pages.pages(line)

    def fork(self, row: int, source: int) -> None:
        """Let the row look at what `source` looks at."""
        if source in self._lines:
            self._lines[row] = self._lines[source]

    def free(self, row: int) -> None:
        """Forget the row, and states that no other row looks at."""
        if (line := self._lines.pop(row, None)) is not None:
            self._drop(line)

    def forget(self) -> None:
        """Share what was cut short with no later row, and drop lines that no row came to."""
        self._made.clear()
        self.pages.recount()
        for line in self.pages.lengths():
            self._drop(line)

    def line(self, row: int) -> int:
        """Return the line of the states that a row looks at.

        Raise InvariantError if there are none.
        """
        if row not in self._lines:
            raise InvariantError("a row of a model with an encoder has no encoder states")
        return self._lines[row]

    def seen_by(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the lines of states that rows look at, and how many positions these have."""
        lines = [self.line(row) for row in rows]
        counts = [self.pages.length(line) for line in lines]
        return np.array(lines, np.int64), np.array(counts, np.int64)

    def _drop(self, line: int) -> None:
        """Drop the line if no row looks at it."""
        if line in self._lines.values():
            return
        states = self._held.pop(line, None)
        if self._made.get(id(states)) == line:
            del self._made[id(states)]
        self.pages.free(line)
