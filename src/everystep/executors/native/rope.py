"""The rotations of a work's tokens, as the library reads them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.executors.native.library import RopeRows
from everystep.executors.positions import position_ids, row_lengths
from everystep.nn.rotary import Rope, rotary_table
from everystep.types import Work

_LEAST_TABLE, _MOST_TABLE = 512, 1 << 17


class RopeTable:
    """Cos and sin of one kind of rope, kept where they do not depend on a row's length."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._tables = (torch.empty(0), torch.empty(0))
        self._kept = RopeRows()

    def rows(self, work: Work, places: np.ndarray | None, longest: int) -> RopeRows:
        """Return the rotation of each token of the work.

        `places`: (N,) or (axes, N) position ids of all, where a feed gives some. `longest`: how
        many positions a row holds at most.
        """
        by_length = self._rope.scaling.by_length
        if places is None and not by_length:
            # And the position after, should the library go on by itself.
            return self._kept_for(longest + 1)
        places = position_ids(work) if places is None else places
        if places.ndim > 1 and not self._rope.axes:
            places = places[0]
        far = int(places.max())
        if by_length or places.ndim > 1 or far >= max(longest, _MOST_TABLE):
            # A table up to a place that somebody chose could take any memory.
            lengths = torch.from_numpy(np.repeat(row_lengths(work), work.counts))
            tables = self._table(torch.from_numpy(places), lengths)
            return self._turned(tables, np.arange(len(work.tokens), dtype=np.int32))
        self._kept_for(far + 1)
        return self._turned(self._tables, places.astype(np.int32))

    def _kept_for(self, length: int) -> RopeRows:
        """Return a table of at least so many positions, for tokens rotated by their own."""
        if len(self._tables[0]) < length:
            longer = self._table(torch.arange(max(_LEAST_TABLE, 2 * length)), None)
            self._kept = self._turned(longer, None)
            self._tables = longer
        return self._kept

    def _turned(self, tables: tuple[Tensor, Tensor], rows: np.ndarray | None) -> RopeRows:
        """Return the rows of a table that rotate tokens; None: those of their positions."""
        cos, sin = tables
        at = None if rows is None else rows.ctypes.data
        made = RopeRows(cos.data_ptr(), sin.data_ptr(), at, self._rope.dim, len(cos))
        made.held = tables, rows
        return made

    def _table(self, positions: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (N, dim) each."""
        table = rotary_table(self._rope, positions, lengths, torch.float32)
        return table.cos[:, 0].contiguous(), table.sin[:, 0].contiguous()
