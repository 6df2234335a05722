"""What rows hold of recurrent layers: states at some of their positions, which are its marks.

A state cannot be cut to a shorter length, so a row keeps one for every length that it may be cut
back to: a feed that wants the logits of n positions leaves n + 1 of them, or one where it wants
none. The states of all rows of a step are one record, immutable, so that forks share it. The states
of a row that is not fed are copied out of the record, or one idle row would keep those of a whole
batch in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.nn.network import State
from everystep.nn.ragged import Ragged

Record = list[tuple[Tensor, ...]]
"""States of M places: per recurrent layer (M, *shape) of each shape."""


class Mark(NamedTuple):
    """The states after the first `position` positions of a row: an entry of a record."""

    position: int
    record: Record
    entry: int

    @property
    def states(self) -> tuple[tuple[Tensor, ...], ...]:
        """One tensor of each shape per recurrent layer, as copies."""
        return tuple(tuple(x[self.entry].clone() for x in one) for one in self.record)

    def apart(self) -> Mark:
        """Return the same states in a record of their own."""
        alone = all(len(x) == 1 for one in self.record for x in one)
        return self if alone else restored(self.position, self.states)


def restored(position: int, states: Sequence[Sequence[Tensor]]) -> Mark:
    """Return a mark with these states, per recurrent layer one tensor of each shape."""
    return Mark(position, [tuple(x[None] for x in one) for one in states], 0)


class Marked(Protocol):
    """Something that stands for the states after so many positions of a row."""

    @property
    def position(self) -> int:
        """The number of positions."""
        ...


M = TypeVar("M", bound=Marked)


def kept_steps(count: int, wanted: int) -> range:
    """Return after how many of its positions a feed leaves states.

    These are beside what it began with, where all its logits are wanted.
    """
    return range(max(count - wanted, 1), count + 1)


def cut_marks(marks: tuple[M, ...], length: int) -> tuple[M, ...]:
    """Return the marks up to `length`, where one must be; none for 0."""
    kept = tuple(mark for mark in marks if mark.position <= length)
    if length and (not kept or kept[-1].position != length):
        raise InvariantError(
            "a recurrent state cannot be cut back to where none was kept",
            wanted=f"one of {[mark.position for mark in marks]}",
            got=length,
            do="Free the row, or cut it to 0, and feed it again",
        )
    return kept if length else ()


class Recurrence:
    """The states of one step: what the feeds begin with, and the record that they end in."""

    def __init__(self, stores: Sequence[State], dtype: torch.dtype, device: torch.device) -> None:
        self._stores = stores
        self._dtype = torch.promote_types(dtype, torch.float32)
        self._device = device
        self.feeds = Ragged.of([], [], device)
        self._record: Record = []
        self._begins: list[tuple[Record, Tensor, Tensor]] = []

    def begin(
        self, marks: Sequence[tuple[Mark, ...]], counts: Sequence[int], wanted: Sequence[int]
    ) -> list[tuple[Mark, ...]]:
        """Begin a step of feeds for rows with these marks; return the marks that they will have."""
        kept = [*map(kept_steps, counts, wanted)]
        self.feeds = Ragged.of(counts, kept, self._device)
        self._record = []
        self._begins = self._gathered([held[-1] if held else None for held in marks])
        made, index = [], 0
        for held, steps, count, want in zip(marks, kept, counts, wanted, strict=True):
            start = held[-1].position if held else 0
            own = [Mark(start + t, self._record, index + i) for i, t in enumerate(steps)]
            index += len(own)
            made.append((*(held[-1:] if want >= count else ()), *own))
        return made

    def _gathered(self, marks: Sequence[Mark | None]) -> list[tuple[Record, Tensor, Tensor]]:
        """Return each record with its entries that rows begin with, and these rows."""
        found: dict[int, tuple[Record, list[int], list[int]]] = {}
        for row, mark in enumerate(marks):
            if mark is not None:
                _, entries, rows = found.setdefault(id(mark.record), (mark.record, [], []))
                entries.append(mark.entry)
                rows.append(row)
        return [
            (record, *(torch.tensor(x, device=self._device) for x in pair))  # type: ignore[misc]
            for record, *pair in found.values()
        ]

    def recall(self, layer: int) -> tuple[Tensor, ...]:
        """Return (R, *shape) of each shape: the states before the feeds, 0 where there are none."""
        rows = len(self.feeds.lengths)
        if len(self._begins) == 1 and len(self._begins[0][2]) == rows:
            record, entries, _ = self._begins[0]
            return tuple(x.index_select(0, entries) for x in record[layer])
        made = [
            torch.zeros(rows, *shape, dtype=self._dtype, device=self._device)
            for shape in self._stores[layer].shapes
        ]
        for record, entries, places in self._begins:
            for x, held in zip(made, record[layer], strict=True):
                x[places] = held.index_select(0, entries).to(x.dtype)
        return tuple(made)

    def remember(self, states: tuple[Tensor, ...]) -> None:
        """Keep (M, *shape) of each shape; layers come one after another."""
        self._record.append(states)
