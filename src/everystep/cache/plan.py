"""How the feeds of a step are laid out for attention: decided once, used by every layer.

Feeds of at most eight positions form one rectangle over the first slots of the pools; longer ones
form spans, of which neighbours with equal lengths and nothing cached are one block. A feed with a
mask of its own, or whose weights are wanted, is a span of its own, and so is every feed where rows
are codes. Positions are packed rectangle first, in the order of slots, so that the usual step (one
position per row, every row) needs no gathering at all. The layout is the same for every bank; what
lies where differs. Nothing here holds keys or values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.cache.bank import Bank, BankPart
from everystep.cache.pool import Link, Segment
from everystep.cache.rows import CacheRow
from everystep.nn.attention import Sight

LONGEST_IN_RECTANGLE = 8


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFeed:
    """`count` positions of a row from `start` on; `index`: its place among the work's feeds.

    `before`, `after`: what the row holds without and with them, bank by bank. `wanted`: of how many
    logits are wanted. `mask`: (1 or H, count, start + count) bool or None; `weights`: whether
    attention weights are wanted; `alone`: it is computed by itself.
    """

    index: int
    row: CacheRow
    start: int
    count: int
    wanted: int
    before: Sequence[BankPart]
    after: Sequence[BankPart]
    mask: Tensor | None
    weights: bool
    alone: bool

    @property
    def slot(self) -> int:
        """Where its tails lie."""
        return self.row.slot

    @property
    def across(self) -> Segment | None:
        """The encoder states of its row."""
        return self.row.across


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The segments that the rows of a rectangle look at, one per row.

    Slots [first, last) of a shelf; `members` (G, W): the rectangle's rows that look at each slot,
    padded with row 0. `group`, `place` (R,): where a row is found in `members`. `length`: the
    longest use. `single`: there is one segment, and `members` is every row in order.
    """

    first: int
    last: int
    length: int
    single: bool
    members: Tensor
    group: Tensor
    place: Tensor

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Queries (R, K, q, D) on keys (G, K, S, D) -> (R, K, q, S)."""
        return self._back(self._gather(q) @ k.transpose(-1, -2), q.shape[0])

    def mix(self, p: Tensor, v: Tensor) -> Tensor:
        """Weights (R, K, q, S) of values (G, K, S, D) -> (R, K, q, D)."""
        return self._back(self._gather(p) @ v, p.shape[0])

    def _gather(self, x: Tensor) -> Tensor:
        """(R, K, q, x) -> (G, K, W * q, x)."""
        if self.single:
            return x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[3])
        return x[self.members].transpose(1, 2).flatten(2, 3)

    def _back(self, x: Tensor, rows: int) -> Tensor:
        """(G, K, W * q, x) -> (R, K, q, x)."""
        if self.single:
            return x.view(x.shape[1], rows, -1, x.shape[3]).transpose(0, 1)
        apart = x.view(*x.shape[:2], self.members.shape[1], -1, x.shape[3])
        return apart.transpose(1, 2)[self.group, self.place]


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """What the rows of a rectangle look at in one bank: segments by levels, then `tail` positions.

    `sight`: what of it their queries see.
    """

    levels: tuple[Level, ...]
    tail: int
    sight: Sight


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Slots [0, rows), `length` positions each, filled up where a row feeds fewer or none.

    `gather` (rows * length,): packed positions; `scatter` (n,): places in the rectangle. Both None
    where they would change nothing. `boxes`: bank by bank. `across`: the encoder states, of which
    rows see `across_seen`.
    """

    rows: int
    length: int
    packed: int
    gather: Tensor | None
    scatter: Tensor | None
    boxes: tuple[Box, ...]
    across: Level | None
    across_seen: Sight


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSpan:
    """Feeds of `count` positions each, packed from `offset` on; several only if all are fresh."""

    offset: int
    count: int
    feeds: tuple[PlannedFeed, ...]

    @property
    def fresh(self) -> bool:
        """Whether nothing of them was cached before."""
        return self.feeds[0].start == 0

    @property
    def stop(self) -> int:
        """Where the packed positions end."""
        return self.offset + self.count * len(self.feeds)


class Writes(NamedTuple):
    """Where the keys and values of packed positions are written in a bank.

    `slots`, `places` (n,), of the packed positions `chosen` (n,); None: of all.
    """

    slots: Tensor
    places: Tensor
    chosen: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`feeds` in packed order; `order` (N,): the feed-order place of each packed position, None if
    they are the same; `writes`: bank by bank."""

    feeds: tuple[PlannedFeed, ...]
    rectangle: Rectangle | None
    spans: tuple[PlannedSpan, ...]
    order: np.ndarray | None
    writes: tuple[Writes, ...]


def make_plan(feeds: Sequence[PlannedFeed], banks: Sequence[Bank], device: torch.device) -> Plan:
    """The layout of a step; every row has its slot."""
    short = sorted((feed for feed in feeds if not feed.alone and not _long(feed)), key=_slot)
    long = [feed for feed in feeds if feed.alone or _long(feed)]
    packed = [*short, *long]
    return Plan(
        feeds=tuple(packed),
        rectangle=_rectangle(short, len(banks), device) if short else None,
        spans=_spans(long, sum(feed.count for feed in short)),
        order=_order(feeds, packed),
        writes=tuple(_writes(packed, bank, device) for bank in range(len(banks))),
    )


def is_long(count: int) -> bool:
    """Whether so many positions are too many for a rectangle."""
    return count > LONGEST_IN_RECTANGLE


def _long(feed: PlannedFeed) -> bool:
    return is_long(feed.count)


def _slot(feed: PlannedFeed) -> int:
    return feed.slot


def _writes(packed: Sequence[PlannedFeed], bank: int, device: torch.device) -> Writes:
    kept = [min(feed.count, feed.after[bank].tail) for feed in packed]
    slots = np.repeat([feed.slot for feed in packed], kept)
    tails = [feed.after[bank].tail for feed in packed]
    places = np.concatenate([_run(tail - n, n) for tail, n in zip(tails, kept, strict=True)])
    chosen = None
    if len(places) < sum(feed.count for feed in packed):
        ends = np.cumsum([feed.count for feed in packed])
        lasts = [_run(end - n, n) for end, n in zip(ends, kept, strict=True)]
        chosen = torch.from_numpy(np.concatenate(lasts)).to(device)
    return Writes(torch.from_numpy(slots).to(device), torch.from_numpy(places).to(device), chosen)


def _run(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count)


def _order(feeds: Sequence[PlannedFeed], packed: Sequence[PlannedFeed]) -> np.ndarray | None:
    if [feed.index for feed in packed] == list(range(len(packed))):
        return None
    ends = np.cumsum([feed.count for feed in feeds])
    return np.concatenate([_run(ends[feed.index] - feed.count, feed.count) for feed in packed])


def _spans(feeds: Sequence[PlannedFeed], offset: int) -> tuple[PlannedSpan, ...]:
    spans: list[PlannedSpan] = []
    for feed in feeds:
        last = spans[-1] if spans else None
        alike = last is not None and last.count == feed.count and last.fresh and feed.start == 0
        if last is not None and alike and not feed.alone and not last.feeds[0].alone:
            spans[-1] = PlannedSpan(last.offset, last.count, (*last.feeds, feed))
        else:
            spans.append(PlannedSpan(offset, feed.count, (feed,)))
        offset += feed.count
    return tuple(spans)


def _rectangle(feeds: Sequence[PlannedFeed], banks: int, device: torch.device) -> Rectangle:
    rows, length = feeds[-1].slot + 1, max(feed.count for feed in feeds)
    by_slot: list[PlannedFeed | None] = [None] * rows
    for feed in feeds:
        by_slot[feed.slot] = feed
    gather, scatter = _filling(feeds, rows, length, device)
    queries = _query_positions(by_slot, length)
    across, across_held = _across_level(by_slot, device)
    return Rectangle(
        rows=rows,
        length=length,
        packed=sum(feed.count for feed in feeds),
        gather=gather,
        scatter=scatter,
        boxes=tuple(_box(by_slot, queries, bank, device) for bank in range(banks)),
        across=across,
        across_seen=Sight(queries, queries, across_held[:, None, None], causal=False),
    )


def _box(
    by_slot: Sequence[PlannedFeed | None], queries: np.ndarray, bank: int, device: torch.device
) -> Box:
    parts = [feed.after[bank] if feed else BankPart() for feed in by_slot]
    levels, keys, held = _chains(parts, device)
    # What a filled-up place or an idle row sees is nothing or wrong, and is never used.
    tails = np.array([part.tail for part in parts])
    bases = np.array([part.base for part in parts])
    run = np.arange(tails.max())
    keys.append(bases[:, None] + run)
    held.append(run < tails[:, None])
    places, there = np.concatenate(keys, axis=1), np.concatenate(held, axis=1)
    # One query after all keys sees every one of them, but for windows.
    causal = queries.shape[1] > 1
    exists = None if not causal and bool(there.all()) else there[:, None, None]
    return Box(tuple(levels), len(run), Sight(queries, places, exists, causal=causal))


def _across_level(
    by_slot: Sequence[PlannedFeed | None], device: torch.device
) -> tuple[Level | None, np.ndarray]:
    """The encoder states that rows look at, and (rows, S) which of them are theirs."""
    states = [feed.across if feed else None for feed in by_slot]
    if not any(states):
        return None, np.empty((len(states), 0), dtype=bool)
    links = [Link(segment, segment.length) if segment else None for segment in states]
    level, held = _level(links, device)
    return level, held


def _filling(
    feeds: Sequence[PlannedFeed], rows: int, length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """See `Rectangle.gather` and `Rectangle.scatter`."""
    if len(feeds) == rows and all(feed.count == length for feed in feeds):
        return None, None
    scatter = np.concatenate([_run(feed.slot * length, feed.count) for feed in feeds])
    gather = np.zeros(rows * length, dtype=np.int64)
    gather[scatter] = np.arange(len(scatter))
    return torch.from_numpy(gather).to(device), torch.from_numpy(scatter).to(device)


def _query_positions(by_slot: Sequence[PlannedFeed | None], length: int) -> np.ndarray:
    """(rows, length); places that are filled up count on."""
    return np.array([feed.start if feed else 0 for feed in by_slot])[:, None] + np.arange(length)


def _chains(
    parts: Sequence[BankPart], device: torch.device
) -> tuple[list[Level], list[np.ndarray], list[np.ndarray]]:
    """Levels, key positions and which keys are held, from the first segment of chains on."""
    levels, keys, held = [], [], []
    starts = np.array([part.first for part in parts])
    chains = [part.chain for part in parts]
    for depth in range(max(map(len, chains))):
        links = [chain[depth] if depth < len(chain) else None for chain in chains]
        level, level_held = _level(links, device)
        levels.append(level)
        keys.append(starts[:, None] + np.arange(level.length))
        held.append(level_held)
        starts = starts + np.array([link.length if link else 0 for link in links])
    return levels, keys, held


def _level(links: Sequence[Link | None], device: torch.device) -> tuple[Level, np.ndarray]:
    """The level of one link per row at most, and (rows, length) which keys are held."""
    slots = [link.segment.slot for link in links if link is not None]
    first, last = min(slots), max(slots) + 1
    # A row without a link looks at the first slot too, with weights that its mask makes zero.
    group = np.array([link.segment.slot - first if link else 0 for link in links])
    place = np.zeros(len(links), dtype=np.int64)
    counts = np.bincount(group, minlength=last - first)
    members = np.zeros((last - first, counts.max()), dtype=np.int64)
    for slot in range(last - first):
        rows = np.flatnonzero(group == slot)
        place[rows] = np.arange(len(rows))
        members[slot, : len(rows)] = rows
    lengths = np.array([0 if link is None else link.length for link in links])
    level = Level(
        first,
        last,
        int(lengths.max()),
        last - first == 1,
        *(torch.from_numpy(array).to(device) for array in (members, group, place)),
    )
    return level, np.arange(level.length) < lengths[:, None]
