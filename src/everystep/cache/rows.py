"""Cache rows: each a chain of shared segments and a tail of its own.

Verbs only note what happens; `settle` does the copying that is left. A fork shares the parent's
chain. If the parent's tail is long (16 positions where there is no segment yet, 128 after one, at
most four segments in a chain), it is frozen first: copied once into a new segment that parent and
child share, so siblings of a prompt cost nothing. Otherwise the child gets a copy of the tail; or,
if the parent is freed in the same round, the parent's own slot and no copy at all. Truncation drops
links, or uses fewer positions of one.

Tails fill the first slots of one pool without gaps. When a row is freed, a new one takes its slot,
or the last row moves there: at most one move per freed row. What the positions mean is not known
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.cache.kv_format import CacheDtype, KvFormat
from everystep.cache.pool import Counts, Pool
from everystep.cache.segments import Link, Segment, Shelf
from everystep.errors import InvariantError, message
from everystep.nn.network import KvShape
from everystep.types import Past

FIRST_FREEZE = 16
LATER_FREEZE = 128
MAX_CHAIN = 4
NOWHERE = -1


@dataclass(slots=True, eq=False)
class Row:
    """`tail` positions in `slot`, after the positions of `chain`.

    A row without a slot yet may have `source`, the slot its tail is to be copied from. -1: none.
    """

    chain: tuple[Link, ...] = ()
    tail: int = 0
    slot: int = NOWHERE
    source: int = NOWHERE
    across: Segment | None = None

    @property
    def home(self) -> int:
        """The slot in which the tail lies now."""
        return self.source if self.slot == NOWHERE else self.slot

    @property
    def base(self) -> int:
        """The position at which the tail starts."""
        return sum(link.length for link in self.chain)

    @property
    def length(self) -> int:
        """How many positions are cached."""
        return self.base + self.tail


class Rows:
    """All rows of an executor and where their keys and values lie.

    `kept`: in which type; those of encoders are kept as computed, in `dtype`.
    """

    def __init__(
        self,
        shape: KvShape,
        dtype: torch.dtype,
        device: torch.device,
        kept: CacheDtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.format = KvFormat(dtype, kept)
        self.counts = Counts()
        layout = (self.format.shape(shape), self.format.dtype, device, self.counts)
        self.tails = Pool(*layout)
        self.shelf = Shelf(*layout)
        self.across = Shelf(shape, dtype, device, self.counts)
        self._rows: dict[int, Row] = {}
        self._owners: list[Row | None] = []
        self._encoders: dict[int, tuple[Tensor, Segment]] = {}

    def __getitem__(self, row: int) -> Row:
        if row not in self._rows:
            raise InvariantError(message(f"row {row} is not allocated"))
        return self._rows[row]

    def items(self) -> Iterable[tuple[int, Row]]:
        """Row numbers and rows."""
        return self._rows.items()

    def allocate(self, row: int) -> None:
        """The row exists and is empty."""
        self._add(row, Row())

    def attach(self, row: int, encoder: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        """The row looks at encoder states (S, E), projected once per tensor to (L, 2, K, S, D)."""
        if id(encoder) in self._encoders:
            self[row].across = self.across.retain(self._encoders[id(encoder)][1])
            return
        segment = self.across.store(project(encoder))
        self._encoders[id(encoder)] = (encoder, segment)
        self[row].across = segment

    def restore(self, row: int, past: Past) -> None:
        """The empty row holds what was exported from another: one segment."""
        self[row].chain = (Link(self.shelf.store(self.format.packed(past.kv)), past.length),)

    def export(self, row: int) -> Past:
        """A copy of what a settled row holds."""
        held = self[row]
        parts = [self.shelf.pool.read(link.segment.slot, link.length) for link in held.chain]
        if held.tail:
            parts.append(self.tails.read(held.home, held.tail))
        across = held.across
        seen = None if across is None else self.across.pool.read(across.slot, across.length).clone()
        kv = self.format.unpacked(torch.cat(parts, dim=3))
        return Past(held.length, kv, across=seen)

    def fork(self, row: int, source: int) -> None:
        """The row holds what `source` holds."""
        parent = self[source]
        if self._worth_freezing(parent):
            self._freeze(parent)
        for link in parent.chain:
            self.shelf.retain(link.segment)
        if parent.across is not None:
            self.across.retain(parent.across)
        source_slot = parent.home if parent.tail else NOWHERE
        child = Row(
            parent.chain,
            parent.tail,
            source=source_slot,
            across=parent.across,
        )
        self._add(row, child)
        self.counts.forks += 1

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions."""
        held = self[row]
        if not 0 <= length <= held.length:
            raise InvariantError(message(f"row {row} cannot be cut", got=length))
        held.tail = max(0, length - held.base)
        if held.tail == 0:
            held.source = NOWHERE
        self._cut_chain(held, length)

    def free(self, row: int) -> None:
        """The row is gone, and with the last one everything."""
        gone = self[row]
        del self._rows[row]
        self._cut_chain(gone, 0)
        if gone.slot != NOWHERE:
            self._owners[gone.slot] = None
        if gone.across is not None:
            self.across.release(gone.across)
            if gone.across.references == 0:
                self._forget_encoder(gone.across)
        if not self._rows:
            # An interrupt may have cut a verb short: whatever it left behind goes now.
            self._owners.clear()
            self._encoders.clear()
            self.shelf.clear()
            self.across.clear()

    def settle(self) -> None:
        """Every row has a slot, its tail lies there, and the slots in use are the first ones."""
        homeless = [row for row in self._rows.values() if row.slot == NOWHERE]
        if not homeless and None not in self._owners:
            return
        homeless = self._inherit(homeless)
        self._place(homeless)
        self._close_gaps()

    def make_room(self, fed: Iterable[Row]) -> None:
        """The tails of the given rows, settled before, may be written up to their length."""
        lengths = [(row.slot, row.tail) for row in fed]
        self.tails.reserve(len(self._owners), max(tail for _, tail in lengths))
        for slot, tail in lengths:
            self.tails.touch(slot, tail)

    def _add(self, row: int, made: Row) -> None:
        if row in self._rows:
            raise InvariantError(message(f"row {row} is allocated twice"))
        self._rows[row] = made

    def _worth_freezing(self, row: Row) -> bool:
        least = LATER_FREEZE if row.chain else FIRST_FREEZE
        return row.tail >= least and len(row.chain) < MAX_CHAIN

    def _freeze(self, row: Row) -> None:
        segment = self.shelf.store(self.tails.read(row.home, row.tail))
        row.chain = (*row.chain, Link(segment, row.tail))
        row.tail, row.source = 0, NOWHERE
        self.counts.freezes += 1

    def _cut_chain(self, row: Row, length: int) -> None:
        kept = []
        for link in row.chain:
            if length > 0:
                kept.append(Link(link.segment, min(link.length, length)))
            else:
                self.shelf.release(link.segment)
            length -= link.length
        row.chain = tuple(kept)

    def _forget_encoder(self, segment: Segment) -> None:
        for key, (_, stored) in list(self._encoders.items()):
            if stored is segment:
                del self._encoders[key]

    def _inherit(self, homeless: list[Row]) -> list[Row]:
        """Forks of freed rows take over their slots; returns the rows that still need one."""
        left = []
        for row in homeless:
            if row.source != NOWHERE and self._owners[row.source] is None:
                self._own(row, row.source)
            else:
                left.append(row)
        return left

    def _place(self, homeless: list[Row]) -> None:
        """New rows take gaps first, then slots at the end; tails are copied in one operation."""
        gaps = [slot for slot, owner in enumerate(self._owners) if owner is None]
        more = len(homeless) - len(gaps)
        if more > 0:
            gaps += range(len(self._owners), len(self._owners) + more)
            self._owners += [None] * more
            self.tails.reserve(len(self._owners), 0)
        sources, targets, length = [], [], 0
        for row, slot in zip(homeless, gaps, strict=False):
            self.tails.wipe(slot)
            if row.source != NOWHERE:
                sources.append(row.source)
                targets.append(slot)
                length = max(length, row.tail)
            self._own(row, slot)
        self.tails.copy(sources, targets, length)
        self.counts.tail_copies += len(sources)

    def _close_gaps(self) -> None:
        """The last rows move into the gaps that are left."""
        for slot, owner in enumerate(self._owners):
            if owner is None:
                last = self._last()
                if last is not None and last.slot > slot:
                    self.tails.wipe(slot)
                    self.tails.copy([last.slot], [slot], last.tail)
                    self._owners[last.slot] = None
                    self._own(last, slot)
                    self.counts.moves += 1
        self._last()

    def _last(self) -> Row | None:
        """The row in the last slot, after slots that nobody has are dropped from the end."""
        while self._owners and self._owners[-1] is None:
            self._owners.pop()
        return self._owners[-1] if self._owners else None

    def _own(self, row: Row, slot: int) -> None:
        row.slot, row.source = slot, NOWHERE
        self._owners[slot] = row
