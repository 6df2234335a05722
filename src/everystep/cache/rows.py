"""Cache rows: what each holds in every bank, and in which slot of the banks its tails lie.

Verbs only note what happens; `settle` does the copying that is left. A fork shares the parent's
segments and gets a copy of its tails; or, if the parent is freed in the same round, the parent's
own slot and no copy at all.

Tails fill the first slots of the pools without gaps; a row has the same slot in every bank. When a
row is freed, a new one takes its slot, or the last row moves there: at most one move per freed row.
What the positions mean is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from everystep.cache.bank import NOWHERE, Bank, BankPart
from everystep.cache.formats import CacheDtype, Quantization
from everystep.cache.pasts import pair
from everystep.cache.pool import CacheCounts, KvShape, Segment, Shelf
from everystep.cache.states import Mark, Recurrence, cut_marks, restored
from everystep.errors import InvariantError, UnsupportedError, message
from everystep.nn.network import Cross, Full, State, Store, Window
from everystep.types import Past


@dataclass(slots=True, eq=False)
class CacheRow:
    """`parts`: what it holds, bank by bank; `marks`: its states, `across`: its encoder states.

    It may be cut back to any length from `floor` on, or to 0. A row without a slot yet may have
    `source`, the slot its tails are to be copied from. -1: none.
    """

    parts: list[BankPart]
    length: int = 0
    floor: int = 0
    slot: int = NOWHERE
    source: int = NOWHERE
    across: Segment | None = None
    marks: tuple[Mark, ...] = ()

    @property
    def home(self) -> int:
        """The slot in which the tails lie now."""
        return self.source if self.slot == NOWHERE else self.slot

    @property
    def has_tails(self) -> bool:
        """Whether anything of it lies in a slot."""
        return any(part.tail for part in self.parts)


class Feeding(Protocol):
    """What rows need to know of a feed."""

    @property
    def row(self) -> CacheRow: ...
    @property
    def count(self) -> int: ...
    @property
    def wanted(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Which layers share a bank: per layer its bank, and its number among the bank's layers.

    `crossed`, `states`: likewise the layers with encoder states and with recurrent ones.
    """

    banks: dict[Full | Window, list[int]] = field(default_factory=dict)
    crossed: dict[int, Cross] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)

    @staticmethod
    def of(stores: Sequence[Sequence[Store]]) -> Layout:
        """What the layers of a network declare."""
        made = Layout()
        for layer, declared in enumerate(stores):
            for store in declared:
                if isinstance(store, State):
                    made.states[layer] = store
                elif isinstance(store, Cross):
                    made.crossed[layer] = store
                else:
                    made.banks.setdefault(store, []).append(layer)
        if len(set(made.crossed.values())) > 1:
            raise UnsupportedError(
                message(
                    "layers look at encoder states in different ways",
                    wanted="equal heads and sizes",
                    got=sorted({str(store) for store in made.crossed.values()}),
                )
            )
        return made


class CacheRows:
    """All rows of an executor and where what they hold lies.

    `kept`: in which form; encoder states and recurrent states are kept as computed.
    """

    def __init__(
        self,
        stores: Sequence[Sequence[Store]],
        dtype: torch.dtype,
        device: torch.device,
        kept: CacheDtype | Quantization | None = None,
    ) -> None:
        self.counts = CacheCounts()
        layout = Layout.of(stores)
        self.layers = len(stores)
        self.banks = [
            Bank(store, len(layers), dtype, device, kept, self.counts)
            for store, layers in layout.banks.items()
        ]
        self.place: dict[int, tuple[int, int]] = {
            layer: (bank, index)
            for bank, layers in enumerate(layout.banks.values())
            for index, layer in enumerate(layers)
        }
        self.crossed = {layer: index for index, layer in enumerate(layout.crossed)}
        self.recurrent = {layer: index for index, layer in enumerate(layout.states)}
        self.recurrence = Recurrence([*layout.states.values()], dtype, device)
        self.across = Shelf(_shape(layout.crossed), dtype, device, self.counts)
        self.forgets = bool(layout.states) or any(bank.forgets for bank in self.banks)
        self._rows: dict[int, CacheRow] = {}
        self._owners: list[CacheRow | None] = []
        self._encoders: dict[int, tuple[Tensor, Segment]] = {}

    def __getitem__(self, row: int) -> CacheRow:
        if row not in self._rows:
            raise InvariantError(message(f"row {row} is not allocated"))
        return self._rows[row]

    def items(self) -> Iterable[tuple[int, CacheRow]]:
        """Row numbers and rows."""
        return self._rows.items()

    @property
    def shared(self) -> int:
        """How many segments are held, encoder states included."""
        return self.across.held + sum(bank.shelf.held for bank in self.banks)

    # --- verbs ------------------------------------------------------------------------------------

    def allocate(self, row: int) -> None:
        """The row exists and is empty."""
        self._add(row, CacheRow([BankPart()] * len(self.banks)))

    def attach(self, row: int, encoder: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        """The row looks at encoder states (S, E), projected once per tensor to (L, 2, K, S, D)."""
        if id(encoder) in self._encoders:
            self[row].across = self.across.retain(self._encoders[id(encoder)][1])
            return
        segment = self.across.store(project(encoder))
        self._encoders[id(encoder)] = (encoder, segment)
        self[row].across = segment

    def restore(self, row: int, past: Past) -> None:
        """The empty row holds what was exported from another."""
        held = self[row]
        held.length = held.floor = past.length
        for index, bank in enumerate(self.banks):
            layers = [layer for layer, (at, _) in self.place.items() if at == index]
            kv = torch.stack([pair(past.layers[layer]) for layer in layers])
            held.parts[index] = bank.restore(kv, past.length)
        if self.recurrent:
            held.marks = (restored(past.length, [past.layers[n] for n in self.recurrent]),)

    def export(self, row: int) -> Past:
        """A copy of what a settled row holds."""
        held = self[row]
        found: list[tuple[Tensor, ...]] = [()] * self.layers
        exported = [
            bank.export(part, held.home, held.length)
            for bank, part in zip(self.banks, held.parts, strict=True)
        ]
        for layer, (bank, index) in self.place.items():
            found[layer] = exported[bank][index]
        for layer, index in self.crossed.items():
            if held.across is not None:
                seen = self.across.pool.read(held.across.slot, held.across.length)[index].clone()
                found[layer] = (*found[layer], *seen)
        for layer, index in self.recurrent.items():
            if held.marks:
                found[layer] = held.marks[-1].states[index]
        return Past(held.length, tuple(found))

    def fork(self, row: int, source: int) -> None:
        """The row holds what `source` holds."""
        parent = self[source]
        for index, bank in enumerate(self.banks):
            parent.parts[index] = bank.fork(parent.parts[index], parent.home)
        if not parent.has_tails:
            parent.source = NOWHERE
        if parent.across is not None:
            self.across.retain(parent.across)
        child = CacheRow(
            [*parent.parts],
            parent.length,
            parent.floor,
            source=parent.home if parent.has_tails else NOWHERE,
            across=parent.across,
            marks=parent.marks,
        )
        self._add(row, child)
        self.counts.forks += 1

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions: none, or as many as it can be cut back to."""
        held = self[row]
        if not (length == 0 or held.floor <= length <= held.length):
            raise InvariantError(
                message(
                    f"row {row} cannot be cut",
                    wanted=f"0, or {held.floor} to {held.length} positions",
                    got=length,
                    do="Cut it to 0 and feed it again",
                )
            )
        self._cut(held, length)

    def free(self, row: int) -> None:
        """The row is gone, and with the last one everything."""
        gone = self[row]
        del self._rows[row]
        self._cut(gone, 0)
        if gone.slot != NOWHERE:
            self._owners[gone.slot] = None
        if gone.across is not None:
            self.across.release(gone.across)
            if gone.across.references == 0:
                self._forget_encoder(gone.across)
        if not self._rows:
            # An interrupt may have cut a verb short: its leftovers are removed now.
            self._owners.clear()
            self._encoders.clear()
            for shelf in (self.across, *(bank.shelf for bank in self.banks)):
                shelf.clear()

    def settle(self) -> None:
        """Every row has a slot, its tails lie there, and the slots in use are the first ones."""
        homeless = [row for row in self._rows.values() if row.slot == NOWHERE]
        if not homeless and None not in self._owners:
            return
        homeless = self._inherit(homeless)
        self._place(homeless)
        self._close_gaps()

    # --- feeds ------------------------------------------------------------------------------------

    def prepare(self, row: CacheRow) -> list[BankPart]:
        """What a settled row holds before a feed, without what no query sees any more."""
        if self.forgets:
            row.parts = [
                bank.settle(part, row.slot, row.length)
                for bank, part in zip(self.banks, row.parts, strict=True)
            ]
        return [*row.parts]

    def extend(self, row: CacheRow, count: int, wanted: int, *, alone: bool) -> None:
        """The row holds `count` more positions, of which the last `wanted` may be taken back.

        `alone` as in `Bank.extended`. Their keys, values and states follow.
        """
        row.length += count
        if self.forgets:
            row.floor = row.length - wanted
        row.parts = [
            bank.extended(part, count, row.length - wanted, alone=alone)
            for bank, part in zip(self.banks, row.parts, strict=True)
        ]

    def make_room(self, fed: Sequence[CacheRow]) -> None:
        """The tails of the given rows, settled before, may be written up to their length."""
        for index, bank in enumerate(self.banks):
            tails = [row.parts[index].tail for row in fed]
            bank.tails.reserve(len(self._owners), max(tails))
            for row, tail in zip(fed, tails, strict=True):
                bank.tails.touch(row.slot, tail)

    def mark(self, feeds: Sequence[Feeding]) -> None:
        """The fed rows, in packed order, have the marks that their recurrent layers will fill."""
        if self.recurrent:
            marks = [feed.row.marks for feed in feeds]
            counts, wanted = [feed.count for feed in feeds], [feed.wanted for feed in feeds]
            for feed, made in zip(feeds, self.recurrence.begin(marks, counts, wanted), strict=True):
                feed.row.marks = made

    def rest(self, fed: Sequence[CacheRow]) -> None:
        """Rows with states that are not fed keep only what is their own."""
        if self.recurrent:
            busy = set(map(id, fed))
            for row in self._rows.values():
                if id(row) not in busy:
                    row.marks = tuple(mark.apart() for mark in row.marks)

    # --- inside -----------------------------------------------------------------------------------

    def _add(self, row: int, made: CacheRow) -> None:
        if row in self._rows:
            raise InvariantError(message(f"row {row} is allocated twice"))
        self._rows[row] = made

    def _cut(self, row: CacheRow, length: int) -> None:
        row.marks = cut_marks(row.marks, length) if self.recurrent else ()
        row.parts = [
            bank.cut(part, length) for bank, part in zip(self.banks, row.parts, strict=True)
        ]
        row.length, row.floor = length, min(row.floor, length)
        if not row.has_tails:
            row.source = NOWHERE

    def _forget_encoder(self, segment: Segment) -> None:
        for key, (_, stored) in list(self._encoders.items()):
            if stored is segment:
                del self._encoders[key]

    def _inherit(self, homeless: list[CacheRow]) -> list[CacheRow]:
        """Forks of freed rows take over their slots; returns the rows that still need one."""
        left = []
        for row in homeless:
            if row.source != NOWHERE and self._owners[row.source] is None:
                self._own(row, row.source)
            else:
                left.append(row)
        return left

    def _place(self, homeless: list[CacheRow]) -> None:
        """New rows take gaps first, then slots at the end; tails are copied in one operation."""
        gaps = [slot for slot, owner in enumerate(self._owners) if owner is None]
        more = len(homeless) - len(gaps)
        if more > 0:
            gaps += range(len(self._owners), len(self._owners) + more)
            self._owners += [None] * more
            for bank in self.banks:
                bank.tails.reserve(len(self._owners), 0)
        moved = []
        for row, slot in zip(homeless, gaps, strict=False):
            for bank in self.banks:
                bank.tails.wipe(slot)
            if row.source != NOWHERE:
                moved.append((row, row.source, slot))
            self._own(row, slot)
        self._copy(moved)
        self.counts.tail_copies += len(moved)

    def _copy(self, moved: Sequence[tuple[CacheRow, int, int]]) -> None:
        """The tails of rows lie in the second of two slots too."""
        if moved:
            rows, sources, targets = zip(*moved, strict=True)
            for index, bank in enumerate(self.banks):
                longest = max(row.parts[index].tail for row in rows)
                bank.tails.copy(sources, targets, longest)

    def _close_gaps(self) -> None:
        """The last rows move into the gaps that are left."""
        for slot, owner in enumerate(self._owners):
            if owner is None:
                last = self._last()
                if last is not None and last.slot > slot:
                    for bank in self.banks:
                        bank.tails.wipe(slot)
                    self._copy([(last, last.slot, slot)])
                    self._owners[last.slot] = None
                    self._own(last, slot)
                    self.counts.moves += 1
        self._last()

    def _last(self) -> CacheRow | None:
        """The row in the last slot, after unused slots are dropped from the end."""
        while self._owners and self._owners[-1] is None:
            self._owners.pop()
        return self._owners[-1] if self._owners else None

    def _own(self, row: CacheRow, slot: int) -> None:
        row.slot, row.source = slot, NOWHERE
        self._owners[slot] = row


def _shape(crossed: dict[int, Cross]) -> KvShape:
    for store in crossed.values():
        return KvShape(len(crossed), store.heads, max(store.key_dim, store.value_dim))
    return KvShape(0, 0, 0)
