"""What a sequence remembers of the hidden states of its positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COLUMNS = "columns"
"""The name under which a sequence remembers its `Columns`."""
_LEAST = 64


@dataclass(slots=True, eq=False)
class _Shelf:
    """`rows`: (capacity, E), of which the first `used` were written; these never change."""

    rows: Tensor
    used: int = 0


@dataclass(slots=True, eq=False)
class Columns:
    """The normalised last hidden states of a sequence's first positions, one after another.

    They only grow at their end. Copies share what both hold, so that siblings which differ in
    their last position cost that position each, and a position is stored once. It is a cache of
    the prefix: what is missing is asked for again. `shift`: visible index minus position.
    """

    shift: int = 0
    _shelf: _Shelf | None = None
    _shared: int = 0
    _own: Tensor | None = None

    @property
    def length(self) -> int:
        return self._shared + (0 if self._own is None else len(self._own))

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        """(n, E) each, all known positions in order; what siblings share is the same memory."""
        shared = () if self._shelf is None else (self._shelf.rows[: self._shared],)
        return shared if self._own is None else (*shared, self._own)

    def append(self, hidden: Tensor) -> None:
        """Append the next positions, (n, E), at least one."""
        self._settle()
        self._own = hidden

    def copy(self) -> Columns:
        """Copy the same positions, from where both go on separately."""
        self._settle()
        return Columns(self.shift, self._shelf, self._shared)

    def rewind(self, visible: int) -> None:
        """Drop what is known beyond the first `visible` ids."""
        length = max(visible - self.shift, 0)
        if self._own is not None:
            own = length - self._shared
            self._own = self._own[:own] if own > 0 else None
        self._shared = min(self._shared, length)

    def _settle(self) -> None:
        """Move its own rows to the shelf, after those that others may share."""
        own = self._own
        if own is None:
            return
        shelf, stop = self._shelf, self._shared + len(own)
        if shelf is None or shelf.used != self._shared or stop > len(shelf.rows):
            # Others go on with the old shelf; twice the room makes this rare.
            with torch.inference_mode(False):
                rows = own.new_empty(max(_LEAST, 2 * stop), own.shape[1])
            if shelf is not None:
                rows[: self._shared] = shelf.rows[: self._shared]
            self._shelf = shelf = _Shelf(rows)
        shelf.rows[self._shared : stop] = own
        shelf.used = self._shared = stop
        self._own = None
