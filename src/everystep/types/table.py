"""The table of visible ids: one line per sequence, handed out and taken back."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

import numpy as np


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a view of the array through which nothing can be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def common_length(tails: Items[np.ndarray]) -> int:
    """Return how many ids all tails begin with."""
    length = min(map(len, tails), default=0)
    for tail in tails[1:]:
        differ = (tail[:length] != tails[0][:length]).nonzero()[0]
        if len(differ):
            length = int(differ[0])
    return length


class TokenTable:
    """The ids of every sequence as processors, stops and outputs see them: (lines, capacity) int64.

    Lines are handed out lowest first, so that a lockstep batch is one block of them.
    """

    def __init__(self, lines: int = 16, capacity: int = 64) -> None:
        self.data = np.zeros((lines, capacity), dtype=np.int64)
        self._free = list(range(lines - 1, -1, -1))

    def shown(self, line: int) -> np.ndarray:
        """Return the line for others to read; writing to it is an error."""
        return read_only(self.data[line])

    def open(self, ids: np.ndarray) -> int:
        """Open a new line that starts with `ids`."""
        line = self._take()
        self.reserve(len(ids))
        self.data[line, : len(ids)] = ids
        return line

    def write(self, line: int, start: int, ids: list[int]) -> None:
        """Write `ids` into the line from `start` on."""
        self.reserve(start + len(ids))
        for place, token in enumerate(ids, start):
            self.data[line, place] = token

    def fork(self, line: int, length: int) -> int:
        """Open a new line that starts with the first `length` ids of `line`."""
        new = self._take()
        self.data[new, :length] = self.data[line, :length]
        return new

    def close(self, line: int) -> None:
        """Close the line, so that it may be handed out again."""
        self._free.append(line)

    def keep(self, lines: Collection[int]) -> None:
        """Keep only the given lines in use."""
        count = self.data.shape[0]
        self._free = [line for line in range(count - 1, -1, -1) if line not in lines]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` ids in every line."""
        lines, held = self.data.shape
        if capacity > held:
            grown = np.zeros((lines, max(capacity, 2 * held)), dtype=np.int64)
            grown[:, :held] = self.data
            self.data = grown

    @property
    def open_lines(self) -> int:
        return self.data.shape[0] - len(self._free)

    def rectangle(self, lines: np.ndarray, width: int) -> np.ndarray:
        """Return (R, width) the first ids of the given lines; a view if these are one block."""
        first = int(lines[0]) if len(lines) else 0
        if np.array_equal(lines, np.arange(first, first + len(lines))):
            return self.data[first : first + len(lines), :width]
        return self.data[lines, :width]

    def _take(self) -> int:
        if not self._free:
            lines, capacity = self.data.shape
            self.data = np.concatenate([self.data, np.zeros((lines, capacity), np.int64)])
            self._free = list(range(2 * lines - 1, lines - 1, -1))
        return self._free.pop()
