"""Rows of an executor: what each holds in every bank, and on which line of the banks its tails lie.

Row numbers are the engine's. Verbs only note what happens; `settle` does the copying that is left.
A fork shares the parent's segments and gets a copy of its tails; or, if the parent is freed in the
same round, the parent's own line and no copy at all.

Tails fill the first lines of the pools without gaps; a row has the same line in every bank. When a
row is freed, a new one takes its line, or the last row moves there: at most one move per freed row.
A row of a model with windows, codes or recurrent states can be cut back to 0 and to what its last
feed wanted logits of, the position before included; others to any length. What the positions mean
is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.cache.bank import NOWHERE, Bank, BankPart
from everystep.cache.formats import CacheDtype, Quantization
from everystep.cache.pasts import pair
from everystep.cache.pool import CacheCounts, Pool, Segment
from everystep.cache.states import Mark, Recurrence, cut_marks, restored
from everystep.errors import InvariantError, UnsupportedError
from everystep.nn.network import Cross, Full, State, Store, Window
from everystep.types import Past, Work


@dataclass(slots=True, eq=False)
class CacheRow:
    """`parts`: what it holds, bank by bank; `marks`: its states, `across`: its encoder states.

    It may be cut back to any length from `floor` on, or to 0. A row without a line yet may have
    `source`, the line its tails are to be copied from. -1: none.
    """

    parts: list[BankPart]
    length: int = 0
    floor: int = 0
    line: int = NOWHERE
    source: int = NOWHERE
    across: Segment | None = None
    marks: tuple[Mark, ...] = ()

    @property
    def home(self) -> int:
        """The line on which the tails lie now."""
        return self.source if self.line == NOWHERE else self.line

    @property
    def has_tails(self) -> bool:
        """True if anything of it lies on a line."""
        return any(part.tail for part in self.parts)


class RowCache:
    """All rows of an executor; `stores`: what each layer of its network keeps of a row.

    `project`: encoder states (S, E) -> keys and values (L, 2, K, S, D), for models with an encoder.
    `kept`: in which form rows keep keys and values, None for `dtype` as it is; encoder states and
    recurrent states are kept as computed. `place`: per layer its bank, and its number among the
    bank's layers; `crossed`, `recurrent`: likewise the layers with encoder states and with
    recurrent ones.
    """

    def __init__(
        self,
        stores: Sequence[Sequence[Store]],
        dtype: torch.dtype,
        device: torch.device,
        project: Callable[[Tensor], Tensor] | None = None,
        kept: CacheDtype | Quantization | None = None,
    ) -> None:
        self.device = device
        self.counts = CacheCounts()
        self.coded = isinstance(kept, Quantization)
        self._depth = len(stores)
        self._project = project
        declared = [(layer, store) for layer, own in enumerate(stores) for store in own]
        crossed = {layer: one for layer, one in declared if isinstance(one, Cross)}
        states = {layer: one for layer, one in declared if isinstance(one, State)}
        sharing: dict[Full | Window, list[int]] = {}
        for layer, store in declared:
            if isinstance(store, Full | Window):
                sharing.setdefault(store, []).append(layer)
        self.banks = [
            Bank(store, len(layers), dtype, device, kept, self.counts)
            for store, layers in sharing.items()
        ]
        self.place = {
            layer: (bank, index)
            for bank, layers in enumerate(sharing.values())
            for index, layer in enumerate(layers)
        }
        self.crossed = {layer: index for index, layer in enumerate(crossed)}
        self.recurrent = {layer: index for index, layer in enumerate(states)}
        self.recurrence = Recurrence([*states.values()], dtype, device)
        self.across = Pool(_shape(crossed), dtype, device, self.counts)
        self.forgets = bool(states) or any(bank.forgets for bank in self.banks)
        self._rows: dict[int, CacheRow] = {}
        self._owners: list[CacheRow | None] = []
        self._encoders: dict[int, tuple[Tensor, Segment]] = {}

    def __getitem__(self, row: int) -> CacheRow:
        if row not in self._rows:
            raise InvariantError(f"row {row} is not allocated")
        return self._rows[row]

    def lengths(self) -> dict[int, int]:
        """Return how many positions each row has cached."""
        return {number: row.length for number, row in self._rows.items()}

    @property
    def lines(self) -> Sequence[CacheRow | None]:
        """The row on each line in use; None on a line without one."""
        return self._owners

    @property
    def shared(self) -> int:
        """The number of segments that are held, encoder states included."""
        return self.across.held + sum(bank.shelf.held for bank in self.banks)

    # --- verbs ------------------------------------------------------------------------------------

    def apply(self, work: Work) -> None:
        """Do what happened since the last step, in order, and copy what has to be."""
        for verb in work.verbs:
            if verb.kind == "allocate":
                self.allocate(verb.row, work.encoders.get(verb.row), work.pasts.get(verb.row))
            elif verb.kind == "fork":
                self.fork(verb.row, verb.value)
            elif verb.kind == "truncate":
                self.truncate(verb.row, verb.value)
            else:
                self.free(verb.row)
        self._settle()

    def allocate(
        self, number: int, encoder: Tensor | None = None, past: Past | None = None
    ) -> None:
        """Add a row that holds `past`; it looks at `encoder` (S, E) where the model has one."""
        row = CacheRow([BankPart()] * len(self.banks))
        self._add(number, row)
        if past is not None:
            self._restore(row, past)
        if encoder is not None and self._project is not None:
            row.across = self._projected(encoder, self._project)

    def export(self, number: int) -> Past:
        """Return a copy of what a settled row holds."""
        row = self[number]
        found: list[tuple[Tensor, ...]] = [()] * self._depth
        exported = [
            bank.export(part, row.home, row.length)
            for bank, part in zip(self.banks, row.parts, strict=True)
        ]
        for layer, (bank, index) in self.place.items():
            found[layer] = exported[bank][index]
        if row.across is not None:
            seen = self.across.read(row.across.line, row.across.length)
            for layer, index in self.crossed.items():
                found[layer] = (*found[layer], *seen[index].clone())
        if row.marks:
            states = row.marks[-1].states
            for layer, index in self.recurrent.items():
                found[layer] = states[index]
        return Past(row.length, tuple(found))

    def fork(self, number: int, source: int) -> None:
        """Add a row that holds what `source` holds."""
        parent = self[source]
        for index, bank in enumerate(self.banks):
            parent.parts[index] = bank.fork(parent.parts[index], parent.home)
        if not parent.has_tails:
            parent.source = NOWHERE
        if parent.across is not None:
            parent.across.references += 1
        child = CacheRow(
            [*parent.parts],
            parent.length,
            parent.floor,
            source=parent.home if parent.has_tails else NOWHERE,
            across=parent.across,
            marks=parent.marks,
        )
        self._add(number, child)
        self.counts.forks += 1

    def truncate(self, number: int, length: int) -> None:
        """Cut the row to its first `length` positions: to none, or where it can be cut."""
        row = self[number]
        if not (length == 0 or row.floor <= length <= row.length):
            raise InvariantError(
                f"row {number} cannot be cut",
                wanted=f"0, or {row.floor} to {row.length} positions",
                got=length,
                do="Cut it to 0 and feed it again",
            )
        self._cut(row, length)

    def free(self, number: int) -> None:
        """Remove the row."""
        gone = self[number]
        del self._rows[number]
        self._cut(gone, 0)
        if gone.line != NOWHERE:
            self._owners[gone.line] = None
        if gone.across is not None:
            self.across.release(gone.across)
            if gone.across.references == 0:
                held = self._encoders.items()
                self._encoders = {key: one for key, one in held if one[1] is not gone.across}

    def clear(self) -> None:
        """Remove every row; the memory stays for others."""
        for number in [*self._rows]:
            self.free(number)

    @property
    def nbytes(self) -> int:
        """The bytes of memory for tails and segments, used or not."""
        pools = [pool for bank in self.banks for pool in (bank.tails, bank.shelf)]
        return sum(pool.nbytes for pool in (*pools, self.across))

    # --- feeds ------------------------------------------------------------------------------------

    def extend(self, row: CacheRow, count: int, wanted: int, *, alone: bool) -> list[BankPart]:
        """Extend the settled row by `count` positions, of which the last `wanted` may be taken
        back.

        Return what it held before, without what no query sees any more. `alone` as in
        `Bank.extended`. The keys, values and states of the positions follow.
        """
        floor = row.length + count - wanted
        if self.forgets:
            row.parts = [
                bank.settle(part, row.line, row.length)
                for bank, part in zip(self.banks, row.parts, strict=True)
            ]
            row.floor = floor
        before = row.parts
        row.length += count
        row.parts = [
            bank.extended(part, count, floor, alone=alone)
            for bank, part in zip(self.banks, before, strict=True)
        ]
        return before

    def make_room(self, fed: Sequence[CacheRow]) -> None:
        """Make room to write the tails of the given rows up to their length.

        Rows with states that are not fed keep only what is their own.
        """
        for index, bank in enumerate(self.banks):
            tails = [row.parts[index].tail for row in fed]
            bank.tails.reserve(len(self._owners), max(tails))
            for row, tail in zip(fed, tails, strict=True):
                bank.tails.touch(row.line, tail)
        if self.recurrent:
            busy = set(map(id, fed))
            for row in self._rows.values():
                if id(row) not in busy:
                    row.marks = tuple(mark.apart() for mark in row.marks)

    def mark(self, fed: Sequence[CacheRow], counts: Sequence[int], wanted: Sequence[int]) -> None:
        """Give the fed rows, in packed order, the marks that their recurrent layers will fill."""
        if self.recurrent:
            marks = self.recurrence.begin([row.marks for row in fed], counts, wanted)
            for row, made in zip(fed, marks, strict=True):
                row.marks = made

    # --- what verbs do ----------------------------------------------------------------------------

    def _add(self, number: int, made: CacheRow) -> None:
        if number in self._rows:
            raise InvariantError(f"row {number} is allocated twice")
        self._rows[number] = made

    def _restore(self, row: CacheRow, past: Past) -> None:
        """Fill the empty row with what was exported from another."""
        row.length = row.floor = past.length
        for index, bank in enumerate(self.banks):
            layers = [layer for layer, (at, _) in self.place.items() if at == index]
            kv = torch.stack([pair(past.layers[layer]) for layer in layers])
            row.parts[index] = bank.restore(kv, past.length)
        if self.recurrent:
            row.marks = (restored(past.length, [past.layers[n] for n in self.recurrent]),)

    def _projected(self, encoder: Tensor, project: Callable[[Tensor], Tensor]) -> Segment:
        """Return keys and values of encoder states, made once per tensor and shared by its rows."""
        if id(encoder) in self._encoders:
            segment = self._encoders[id(encoder)][1]
            segment.references += 1
            return segment
        segment = self.across.store(project(encoder))
        self._encoders[id(encoder)] = (encoder, segment)
        return segment

    def _cut(self, row: CacheRow, length: int) -> None:
        row.marks = cut_marks(row.marks, length) if self.recurrent else ()
        row.parts = [
            bank.cut(part, length) for bank, part in zip(self.banks, row.parts, strict=True)
        ]
        row.length, row.floor = length, min(row.floor, length)
        if not row.has_tails:
            row.source = NOWHERE

    # --- lines ------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Give every row a line with its tails; the lines in use are the first ones."""
        homeless = [row for row in self._rows.values() if row.line == NOWHERE]
        if homeless or None in self._owners:
            self._place([row for row in homeless if not self._inherits(row)])
            self._close_gaps()

    def _inherits(self, row: CacheRow) -> bool:
        """Let the row, if it is a fork of a freed one, take over its line.

        Return whether it did.
        """
        if row.source == NOWHERE or self._owners[row.source] is not None:
            return False
        self._owners[row.source] = row
        row.line, row.source = row.source, NOWHERE
        return True

    def _place(self, homeless: list[CacheRow]) -> None:
        """Place new rows in gaps first, then on lines at the end; copy tails in one operation."""
        gaps = [line for line, owner in enumerate(self._owners) if owner is None]
        more = len(homeless) - len(gaps)
        if more > 0:
            gaps += range(len(self._owners), len(self._owners) + more)
            self._owners += [None] * more
            for bank in self.banks:
                bank.tails.reserve(len(self._owners), 0)
        moved = []
        for row, line in zip(homeless, gaps, strict=False):
            if row.source != NOWHERE:
                moved.append((row, row.source, line))
            self._own(row, line)
        self._copy(moved)
        self.counts.tail_copies += len(moved)

    def _copy(self, moved: Sequence[tuple[CacheRow, int, int]]) -> None:
        """Copy the tails of rows from the first to the second of two lines."""
        if moved:
            rows, sources, targets = zip(*moved, strict=True)
            for index, bank in enumerate(self.banks):
                longest = max(row.parts[index].tail for row in rows)
                bank.tails.copy(sources, targets, longest)

    def _close_gaps(self) -> None:
        """Move the last rows into the gaps that are left."""
        for line, owner in enumerate(self._owners):
            if owner is None:
                last = self._last()
                if last is not None and last.line > line:
                    source = last.line
                    self._own(last, line)
                    self._copy([(last, source, line)])
                    self._owners[source] = None
                    self.counts.moves += 1
        self._last()

    def _last(self) -> CacheRow | None:
        """Return the row on the last line, after unused lines are dropped from the end."""
        while self._owners and self._owners[-1] is None:
            self._owners.pop()
        return self._owners[-1] if self._owners else None

    def _own(self, row: CacheRow, line: int) -> None:
        """Give the row this line, which is wiped."""
        for bank in self.banks:
            bank.tails.wipe(line)
        row.line, row.source = line, NOWHERE
        self._owners[line] = row


def _shape(crossed: dict[int, Cross]) -> tuple[int, int, int]:
    """Return (L, K, D) of encoder states."""
    kinds = set(crossed.values())
    if len(kinds) > 1:
        raise UnsupportedError(
            "layers look at encoder states in different ways",
            wanted="equal heads and sizes",
            got=sorted(map(str, kinds)),
        )
    if not kinds:
        return 0, 0, 0
    (store,) = kinds
    return len(crossed), store.heads, max(store.key_dim, store.value_dim)
