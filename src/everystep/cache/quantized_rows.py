"""Cache rows that hold all but their last positions as integers of 8 or 4 bits.

What a query sees depends on its position alone: at position i the first `Quantization.packed(i)`
positions are what their codes stand for, the others are exact, however they were fed. Segments of
codes and tails are never changed once a step is over, so forks share them. There are no windows, no
encoders here, and nothing is taken back: the exact numbers of what was packed are
gone. Every feed is computed by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.cache.affine import (
    Codes,
    Quantization,
    decode_keys,
    decode_values,
    encode_keys,
    encode_values,
)
from everystep.cache.row_cache import fed_rows, perform
from everystep.errors import InvariantError, message
from everystep.nn.attention import Rule, additive, attend, fold_heads, unfold_heads
from everystep.nn.network import KvShape
from everystep.nn.relative_bias import RelativeBias
from everystep.types import Past, Work


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegment:
    """Whole groups of positions: keys and values as codes, (L, K, groups, group, D)."""

    keys: Codes
    values: Codes
    length: int

    def layer(self, index: int) -> PackedSegment:
        """The segment of one layer, (K, groups, group, D)."""
        keys, values = (Codes(*(x[index] for x in c.parts)) for c in (self.keys, self.values))
        return PackedSegment(keys, values, self.length)

    def decoded(self, bits: int, dtype: torch.dtype) -> Tensor:
        """(2, ..., length, D): what the codes stand for."""
        keys, values = decode_keys(self.keys, bits, dtype), decode_values(self.values, bits, dtype)
        return torch.stack([keys.flatten(-3, -2), values.flatten(-3, -2)])

    @property
    def stored_bytes(self) -> int:
        """What it costs."""
        parts = (*self.keys.parts, *self.values.parts)
        return sum(part.numel() * part.element_size() for part in parts)


@dataclass(slots=True, eq=False)
class QuantizedRow:
    """`segments`, one after another, and behind them `tail` (L, 2, K, n, D) in full precision."""

    segments: tuple[PackedSegment, ...]
    tail: Tensor

    @property
    def base(self) -> int:
        """The position at which the tail starts."""
        return sum(segment.length for segment in self.segments)

    @property
    def length(self) -> int:
        """How many positions are cached."""
        return self.base + self.tail.shape[3]

    @property
    def stored_bytes(self) -> int:
        """What it costs, shared segments included."""
        tail = self.tail.numel() * self.tail.element_size()
        return tail + sum(segment.stored_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedFeed:
    """`count` positions of a row from `start` on."""

    row: QuantizedRow
    start: int
    count: int


class QuantizedRowCache:
    """Rows of codes for one executor, with the interface of `RowCache`."""

    def __init__(
        self, shape: KvShape, dtype: torch.dtype, device: torch.device, how: Quantization
    ) -> None:
        self._how = how
        self._none = torch.empty(
            shape.layers, 2, shape.kv_heads, 0, shape.head_dim, dtype=dtype, device=device
        )
        self._rows: dict[int, QuantizedRow] = {}

    def __getitem__(self, row: int) -> QuantizedRow:
        if row not in self._rows:
            raise InvariantError(message(f"row {row} is not allocated"))
        return self._rows[row]

    def apply(self, work: Work) -> None:
        """Does what happened since the last step, in order."""
        perform(self, work)

    def begin(self, work: Work) -> QuantizedContext:
        """A context for the feeds of a work whose verbs were applied.

        Afterwards every fed row has the length it will have when the step is over.
        """
        feeds = []
        for row, start, count in fed_rows(work, self.__getitem__):
            self._pack(row)
            room = row.tail.new_empty(*row.tail.shape[:3], count, row.tail.shape[4])
            row.tail = torch.cat([row.tail, room], dim=3)
            feeds.append(QuantizedFeed(row, start, count))
        return QuantizedContext(feeds, self._how)

    def allocate(
        self,
        row: int,
        encoder: Tensor | None = None,
        past: Past | None = None,
    ) -> None:
        """The row exists and holds `past`."""
        if row in self._rows:
            raise InvariantError(message(f"row {row} is allocated twice"))
        self._rows[row] = QuantizedRow((), self._none if past is None else past.kv)

    def fork(self, row: int, source: int) -> None:
        """The row holds what `source` holds."""
        parent = self[source]
        self._pack(parent)
        self._rows[row] = QuantizedRow(parent.segments, parent.tail)

    def truncate(self, row: int, length: int) -> None:
        """The row holds its first `length` positions, none of which was packed too early."""
        held = self[row]
        if not held.base <= self._how.packed(length) <= length <= held.length:
            raise InvariantError(message(f"row {row} cannot be cut", got=length))
        held.tail = held.tail[:, :, :, : length - held.base]

    def free(self, row: int) -> None:
        """The row is gone, and with it what no other row refers to."""
        del self._rows[row]

    def export(self, row: int) -> Past:
        """What the row holds, as a copy; what was packed, as its codes stand for it."""
        held = self[row]
        self._pack(held)
        bits, dtype = self._how.bits, held.tail.dtype
        packed = [segment.decoded(bits, dtype).transpose(0, 1) for segment in held.segments]
        return Past(held.length, torch.cat([*packed, held.tail], dim=3))

    def lengths(self) -> dict[int, int]:
        """Row -> cached positions."""
        return {number: row.length for number, row in self._rows.items()}

    def _pack(self, row: QuantizedRow) -> None:
        """What no later query sees in full precision becomes codes."""
        count = self._how.packed(row.length) - row.base
        if count > 0:
            row.segments = (*row.segments, _packed_segment(row.tail[:, :, :, :count], self._how))
            # A copy, or what was packed would stay in memory.
            row.tail = row.tail[:, :, :, count:].clone()


class QuantizedContext:
    """What the layers of a network see of quantised rows in one step."""

    attentions: Mapping[int, list[Tensor]] = {}
    cross_attentions: Mapping[int, list[Tensor]] = {}
    order: np.ndarray | None = None

    def __init__(self, feeds: Sequence[QuantizedFeed], how: Quantization) -> None:
        self._feeds = feeds
        self._how = how
        self.kept: list[Tensor] | None = None
        self._masks: dict[int, Tensor | None] = {}

    def keep(self, hidden: Tensor) -> None:
        """Remembers (N, E) hidden states if somebody asked for layers."""
        if self.kept is not None:
            self.kept.append(hidden)

    def attend(
        self, layer: int, q: Tensor, kv: Tensor, rule: Rule, bias: RelativeBias | None = None
    ) -> Tensor:
        """Stores kv (N, 2, K, D), lets q (N, H, D) look at its rows, returns (N, H * D)."""
        outs, stop = [], 0
        for index, feed in enumerate(self._feeds):
            first, stop = stop, stop + feed.count
            feed.row.tail[layer, :, :, -feed.count :] = kv[first:stop].permute(1, 2, 0, 3)
            k, v = self._seen(layer, feed)
            folded = fold_heads(q[None, first:stop], k.shape[0])
            mask = self._mask(index, folded.shape[2], q.dtype)
            outs.append(unfold_heads(attend(folded, k[None], v[None], rule, mask), feed.count))
        return torch.cat(outs)

    def attend_across(self, layer: int, q: Tensor, rule: Rule) -> Tensor:
        """Never called: there is no encoder."""
        raise InvariantError(message("quantised rows have no encoder states"))

    def _seen(self, layer: int, feed: QuantizedFeed) -> Tensor:
        """(2, K, S, D): what some query sees packed, then what some query sees in full."""
        bits, tail = self._how.bits, feed.row.tail[layer]
        parts = [segment.layer(layer).decoded(bits, tail.dtype) for segment in feed.row.segments]
        soon = self._how.packed(feed.start + feed.count - 1) - feed.row.base
        if soon > 0:
            segment = _packed_segment(tail[None, :, :, :soon], self._how)
            parts.append(segment.layer(0).decoded(bits, tail.dtype))
        return torch.cat([*parts, tail], dim=2)

    def _mask(self, index: int, folded: int, dtype: torch.dtype) -> Tensor | None:
        """(1, T * H/K, S) for the keys of `_seen`, or None where every key is seen."""
        feed = self._feeds[index]
        if feed.count == 1:
            return None
        if index not in self._masks:
            device = feed.row.tail.device
            places = torch.arange(feed.start + feed.count, device=device)
            queries = places[feed.start :, None]
            bounds = torch.tensor([[self._how.packed(i)] for i in queries.flatten().tolist()])
            bounds = bounds.to(device)
            packed, full = places[: int(bounds[-1])], places[feed.row.base :]
            seen = torch.cat([packed < bounds, (full >= bounds) & (full <= queries)], dim=1)
            mask = additive(seen, dtype)[None]
            self._masks[index] = mask.repeat_interleave(folded // feed.count, dim=1)
        return self._masks[index]


def _packed_segment(full: Tensor, how: Quantization) -> PackedSegment:
    """(L, 2, K, n, D), n a multiple of the group, as codes."""
    keys, values = full.unflatten(3, (-1, how.group)).unbind(1)  # type: ignore[no-untyped-call]
    return PackedSegment(
        encode_keys(keys, how.bits), encode_values(values, how.bits, how.group), full.shape[3]
    )
