"""Which encoder states the rows of an executor look at, and where their keys and values lie.

They are made once per tensor of states and shared by all rows that look at it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from everystep.errors import InvariantError
from everystep.executors.native.pages import PagedRows


@dataclass(slots=True)
class StatesOfRows:
    """`pages`: has a line for each tensor of states that some row looks at."""

    pages: PagedRows = field(default_factory=PagedRows)
    _lines: dict[int, int] = field(default_factory=dict)  # row -> line
    _held: dict[int, Tensor] = field(default_factory=dict)  # line -> states
    _made: dict[int, int] = field(default_factory=dict)  # id of states -> line
    _shares: Counter[int] = field(default_factory=Counter)  # of lines

    def look_at(self, row: int, states: Tensor) -> np.ndarray | None:
        """The row looks at states (S, E). Returns the pages of keys and values that are to be made,
        None where they are there."""
        if (line := self._made.get(id(states))) is not None:
            self._share(row, line)
            return None
        line = next(number for number in range(len(self._held) + 1) if number not in self._held)
        self.pages.allocate(line)
        self._held[line] = states
        self._share(row, line)
        self.pages.extend([line], [0], [len(states)])
        self._made[id(states)] = line
        return self.pages.pages(line)

    def fork(self, row: int, source: int) -> None:
        """The row looks at what `source` looks at."""
        if source in self._lines:
            self._share(row, self._lines[source])

    def free(self, row: int) -> None:
        """The row is gone, and so are states that no other looks at."""
        line = self._lines.pop(row, None)
        if line is None:
            return
        self._shares[line] -= 1
        if not self._shares[line]:
            states = self._held.pop(line)
            if self._made.get(id(states)) == line:
                del self._made[id(states)]
            self.pages.free(line)

    def forget(self) -> None:
        """What was being made when it was cut short is not shared with later rows."""
        self._made.clear()
        self.pages.recount()

    def line(self, row: int) -> int:
        """The line of the states that a row looks at; InvariantError if there are none."""
        if row not in self._lines:
            raise InvariantError("a row of a model with an encoder has no encoder states")
        return self._lines[row]

    def seen_by(self, rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The lines of states that rows look at, and how many positions these have."""
        lines = [self.line(row) for row in rows]
        counts = [self.pages.length(line) for line in lines]
        return np.array(lines, np.int64), np.array(counts, np.int64)

    def _share(self, row: int, line: int) -> None:
        self._lines[row] = line
        self._shares[line] += 1
