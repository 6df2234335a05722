"""A bank: where all layers with equal stores keep what rows hold, and what a row holds in it.

    positions of a row   [ dropped | segments of the chain | tail ]
                         0         first                   base   length

A fork shares the chain. A long tail (16 positions where there is no segment yet, 128 after one, at
most four segments in a chain) is frozen first: copied once into a segment that parent and child
share. Truncation drops links, or uses fewer positions of one.

A bank of windowed layers drops what no later query sees. A bank of affine codes turns whole groups
of positions into codes, which are its segments; what a query sees depends on its position alone: at
position i the first `Quantization.packed(i)` positions are what their codes stand for, the others
are exact, however they were fed. Both go only as far as the least position that a row may still be
cut back to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype, Codes, KvFormat, Quantization
from everystep.cache.pool import CacheCounts, Link, Pool, Segment
from everystep.nn.network import Full, Window

FIRST_FREEZE = 16
LATER_FREEZE = 128
MAX_CHAIN = 4
LEAST_SHIFT = 16
NOWHERE = -1


class BankPart(NamedTuple):
    """The contents of a row in a bank: `chain` from position `first` on, then `tail` positions."""

    first: int = 0
    chain: tuple[Link, ...] = ()
    tail: int = 0

    @property
    def base(self) -> int:
        """The position at which the tail starts."""
        return self.first + sum([link.length for link in self.chain])

    @property
    def length(self) -> int:
        """The position after the last."""
        return self.base + self.tail


class Bank:
    """Tails and segments of `layers` layers, (2, K, n, D) of each.

    `kept`: the type of what is stored, or how it becomes codes; None for `dtype`.
    """

    def __init__(
        self,
        store: Full | Window,
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        kept: CacheDtype | Quantization | None,
        counts: CacheCounts,
    ) -> None:
        self.store = store
        self.coding = kept if isinstance(kept, Quantization) else None
        self.format = KvFormat(dtype, None if isinstance(kept, Quantization) else kept)
        # Codes are small, and their groups need not end where a window begins.
        drops = isinstance(store, Window) and self.coding is None
        self._window = store.size if isinstance(store, Window) and drops else None
        width = self.format.width(max(store.key_dim, store.value_dim))
        layout = ((layers, store.heads, width), self.format.dtype, device, counts)
        self.tails = Pool(*layout)
        self.shelf = Pool(*layout)
        self._layers = layers
        self._counts = counts

    @property
    def forgets(self) -> bool:
        """True if something of a row is dropped or rounded before the row is freed."""
        return self._window is not None or self.coding is not None

    # --- verbs ------------------------------------------------------------------------------------

    def restore(self, kv: Tensor, length: int) -> BankPart:
        """Return a row of `length` positions, the last ones of which are kv (L, 2, K, n, D)."""
        count = kv.shape[3]
        if not count:
            return BankPart(length)
        segment = self.shelf.store(self.format.packed(kv))
        return BankPart(length - count, (Link(segment, count),))

    def fork(self, part: BankPart, line: int) -> BankPart:
        """Return what two rows share from now on, but for a tail that is left in `line`."""
        least = LATER_FREEZE if part.chain else FIRST_FREEZE
        if self.coding is None and part.tail >= least and len(part.chain) < MAX_CHAIN:
            segment = self.shelf.store(self.tails.read(line, part.tail))
            part = BankPart(part.first, (*part.chain, Link(segment, part.tail)))
            self._counts.freezes += 1
        for link in part.chain:
            link.segment.references += 1
        return part

    def cut(self, part: BankPart, length: int) -> BankPart:
        """Leave only the positions before `length`."""
        tail, kept, at = max(0, length - part.base), [], part.first
        for link in part.chain:
            if at < length:
                kept.append(Link(link.segment, min(link.length, length - at)))
            else:
                self.shelf.release(link.segment)
            at += link.length
        return BankPart(min(part.first, length), tuple(kept), tail)

    # --- feeds ------------------------------------------------------------------------------------

    def settle(self, part: BankPart, line: int, start: int) -> BankPart:
        """Drop, before a feed at `start`, what no query from there on sees."""
        if self.coding is not None:
            return self._absorbed(part, line)
        if self._window is None:
            return part
        least = max(start - self._window + 1, 0)
        while part.chain and part.first + part.chain[0].length <= least:
            self.shelf.release(part.chain[0].segment)
            part = BankPart(part.first + part.chain[0].length, part.chain[1:], part.tail)
        gone = min(least - part.first, part.tail)
        # A shift costs a copy of the window, so that it is done once for many positions.
        if part.chain or gone < max(LEAST_SHIFT, self._window // 4):
            return part
        self.tails.shift(line, gone, part.tail)
        return BankPart(part.first + gone, (), part.tail - gone)

    def extended(self, part: BankPart, count: int, floor: int, *, alone: bool) -> BankPart:
        """Return the row after `count` more positions; it may be cut back to `floor`.

        `alone`: the feed brings what its own queries see, so that not all of it must be stored.
        """
        if self.coding is not None:
            base, end = part.base, part.length + count
            # Codes are made of what some query of this feed sees as codes.
            packed = self.coding.packed(min(floor, end - 1))
            if packed <= base:
                return BankPart(part.first, part.chain, end - base)
            made = Link(Segment(NOWHERE, packed - base, codes=[]), packed - base)
            return BankPart(part.first, (*part.chain, made), end - packed)
        if alone and self._window is not None:
            first = floor - self._window + 1
            if first > part.length:
                for link in part.chain:
                    self.shelf.release(link.segment)
                return BankPart(first, (), part.length + count - first)
        return BankPart(part.first, part.chain, part.tail + count)

    def _absorbed(self, part: BankPart, line: int) -> BankPart:
        """Return the same positions, those restored in full precision as a tail or as codes."""
        exact = [link for link in part.chain if link.segment.codes is None]
        if not exact:
            return part
        (link,) = exact
        kv = self.shelf.read(link.segment.line, link.length)
        count = self.how.packed(link.length)
        segment = Segment(NOWHERE, count, codes=[])
        for layer in kv:
            self.encode(layer[:, :, :count], segment)
        self.tails.reserve(line + 1, link.length - count)
        self.tails.fill(line, kv[:, :, :, count:])
        self.shelf.release(link.segment)
        chain = (Link(segment, count),) if count else ()
        return BankPart(part.first, chain, link.length - count)

    # --- keys and values --------------------------------------------------------------------------

    def read(self, layer: int, part: BankPart, line: int) -> list[Tensor]:
        """Return what a layer holds of a row, (2, K, n, D), one after another."""
        shelf, parts = self.shelf.layer(layer), []
        for segment, length in part.chain:
            if segment.codes is not None:
                parts.append(self._decoded(segment.codes[layer], self.format.computed))
            else:
                parts.append(self.format.unpacked(shelf[:, segment.line, :, :length]))
        if part.tail:
            parts.append(self.format.unpacked(self.tails.layer(layer)[:, line, :, : part.tail]))
        return parts

    def export(self, part: BankPart, line: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of (K, n, D) keys and values of the last n of `length` positions."""
        keys, values = self.store.key_dim, self.store.value_dim
        # One more than the next query sees: cache objects have room for a whole window.
        first = 0 if self._window is None else max(length - self._window, 0)
        gone = max(first - part.first, 0)
        found = []
        for layer in range(self._layers):
            nothing = self.format.unpacked(self.tails.layer(layer)[:, 0, :, :0])
            kv = torch.cat([nothing, *self.read(layer, part, line)], dim=2)[:, :, gone:]
            found.append((kv[0, ..., :keys].clone(), kv[1, ..., :values].clone()))
        return found

    # --- codes ------------------------------------------------------------------------------------

    def encode(self, exact: Tensor, segment: Segment | None) -> Tensor:
        """Return positions (2, K, n, D), whole groups, as their codes stand for them.

        `segment` keeps the codes of the first of them; layers come one after another.
        """
        codes = self.how.encode(*exact.unflatten(2, (-1, self.how.group)))  # type: ignore[no-untyped-call]
        if segment is not None and segment.codes is not None:
            count = segment.length // self.how.group
            segment.codes.append((codes[0].first(count), codes[1].first(count)))
        return self._decoded(codes, exact.dtype)

    def _decoded(self, codes: tuple[Codes, Codes], dtype: torch.dtype) -> Tensor:
        """Return (2, K, n, D): what the codes of keys and of values stand for."""
        return torch.stack(self.how.decode(*codes, dtype)).flatten(-3, -2)

    @property
    def how(self) -> Quantization:
        """The coding of a bank of codes."""
        assert self.coding is not None, "only a bank of codes has codes"
        return self.coding
