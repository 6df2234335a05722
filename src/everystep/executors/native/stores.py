"""What the rows of an executor hold in the library's pages: keys and values, or states."""

from __future__ import annotations

from ctypes import CDLL
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.cache.pasts import kv_of, past_of, states_of, states_past
from everystep.executors.native.library import StackWeights, StepWork
from everystep.executors.native.page_tables import PagedRows
from everystep.executors.native.states import StateRows
from everystep.types import Past, Work


class Opened(NamedTuple):
    """An open runner of the library, and what it runs."""

    library: CDLL
    runner: int
    shape: StackWeights


class KeyStore:
    """Keys and values of all layers."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.rows = PagedRows()
        self._table = addressed(self.rows.table)

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        return past_of(exported(self.opened, self.rows, row))

    def hold(self, row: int, length: int) -> None:
        """Give the empty row pages for so many positions, which are to be filled."""
        self.rows.extend([row], [0], [length])

    def fill(self, row: int, past: Past) -> None:
        """Fill the pages of the row with what the past holds."""
        kv, pages = kv_of(past).float().contiguous(), self.rows.pages(row)
        runner = self.opened.runner
        self.opened.library.es_import(runner, pages.ctypes.data, past.length, kv.data_ptr())

    def write(self, step: StepWork, work: Work) -> tuple[object, int]:
        """Write the pages of all rows, which have room for the feeds, into the structure.

        Return what it points to, and the most positions that a row holds.
        """
        feeds = (work.rows.tolist(), work.starts.tolist(), work.counts.tolist())
        copies, longest = self.rows.extend(*feeds)
        if self.rows.table is not self._table[0]:
            self._table = addressed(self.rows.table)
        step.stride, step.pages = self.rows.table.shape[1], self._table[1]
        step.copies = len(copies)
        if not copies:
            return None, longest
        copied = np.array(copies, np.int32).T.copy()
        step.copy_from, step.copy_to = (addressed(numbers)[1] for numbers in copied)
        return copied, longest


class StateStore:
    """States of all layers after some positions of a row."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.rows = StateRows()

    def export(self, row: int) -> Past:
        """Return what the row holds, as a copy."""
        library, runner, shape = self.opened
        if (page := self.rows.page(row)) is None:
            return Past(0, ((),) * shape.layers)
        inputs = shape.kernel - 1
        held = torch.empty(shape.layers, inputs + shape.states, shape.inner)
        library.es_export_states(runner, page, held.data_ptr())
        return states_past(self.rows.length(row), held, inputs)

    def hold(self, row: int, length: int) -> None:
        """Give the empty row a page for the states after so many positions, to be filled."""
        self.rows.restore(row, length)

    def fill(self, row: int, past: Past) -> None:
        """Fill the page of the row with what the past holds."""
        held = states_of(past)
        self.opened.library.es_import_states(
            self.opened.runner, self.rows.page(row), held.data_ptr()
        )

    def write(self, step: StepWork, work: Work) -> tuple[object, int]:
        """Write the pages in which states lie and will lie into the structure.

        Return what it points to, and 0: no rope turns anything.
        """
        feeds = (work.rows, work.starts, work.counts, work.logits)
        kept = self.rows.extend(*(numbers.tolist() for numbers in feeds))
        step.states_before, step.states_kept, step.states_after, step.states_next = (
            addressed(numbers)[1] for numbers in kept
        )
        return kept, 0


def exported(opened: Opened, rows: PagedRows, row: int, *, across: bool = False) -> Tensor:
    """Return (L, 2, K, length, D) of a line of pages; `across`: those of encoder states."""
    length, shape = rows.length(row), opened.shape
    kv = torch.empty(shape.layers, 2, shape.kv_heads, length, shape.head_dim)
    pages = rows.pages(row)
    opened.library.es_export(opened.runner, pages.ctypes.data, length, across, kv.data_ptr())
    return kv


def addressed(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Return an array and its address, to be replaced together, so that no interrupt parts them."""
    return array, array.__array_interface__["data"][0]
