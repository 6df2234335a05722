"""How the feeds of a step are laid out for attention: decided once, used by every layer.

Feeds of at most eight positions form one rectangle over the first lines of the pools; longer ones
form spans, of which neighbours with equal lengths and nothing cached are one. A feed with a mask of
its own, or whose weights are wanted, is a span of its own, and so is every feed where rows are
codes. Positions are packed rectangle first, in the order of lines, so that the usual step (one
position per row, every row) needs no gathering at all. The layout is the same for every bank; what
lies where differs. Nothing here holds keys or values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.cache.bank import BankPart
from everystep.cache.pool import Link
from everystep.cache.rows import CacheRow, RowCache
from everystep.devices import on_device
from everystep.errors import InvariantError
from everystep.nn.attention import View
from everystep.types import Extra, Work

LONGEST_IN_RECTANGLE = 8
_PLAIN = Extra()


@dataclass(slots=True, eq=False)
class PlannedFeed:
    """`count` positions of a row from `start` on; `index`: its place among the work's feeds.

    `before`, `after`: what the row holds without and with them, bank by bank. `mask`: (1 or H,
    count, start + count) bool or None; `weights`: whether attention weights are wanted; `alone`: it
    is computed by itself. Its positions are packed from `offset` on.
    """

    index: int
    row: CacheRow
    start: int
    count: int
    before: Sequence[BankPart]
    after: Sequence[BankPart]
    mask: Tensor | None
    weights: bool
    alone: bool
    offset: int = 0

    @property
    def in_span(self) -> bool:
        """True if it is no part of the rectangle."""
        return self.alone or self.count > LONGEST_IN_RECTANGLE


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The segments that the rows of a rectangle look at, one per row.

    Lines [first, last) of a shelf; `members` (G, W): the rectangle's rows that look at each line,
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
        """Multiply queries (R, K, q, D) by keys (G, K, S, D) -> (R, K, q, S)."""
        return self._back(self._gather(q) @ k.transpose(-1, -2), q.shape[0])

    def mix(self, p: Tensor, v: Tensor) -> Tensor:
        """Mix values (G, K, S, D) by weights (R, K, q, S) -> (R, K, q, D)."""
        return self._back(self._gather(p) @ v, p.shape[0])

    def _gather(self, x: Tensor) -> Tensor:
        """Gather (R, K, q, x) -> (G, K, W * q, x)."""
        if self.single:
            return x.transpose(0, 1).reshape(1, x.shape[1], -1, x.shape[3])
        return x[self.members].transpose(1, 2).flatten(2, 3)

    def _back(self, x: Tensor, rows: int) -> Tensor:
        """Take (G, K, W * q, x) back to (R, K, q, x)."""
        if self.single:
            return x.view(x.shape[1], rows, -1, x.shape[3]).transpose(0, 1)
        apart = x.view(*x.shape[:2], self.members.shape[1], -1, x.shape[3])
        return apart.transpose(1, 2)[self.group, self.place]


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """The keys of a rectangle's rows in one bank: segments by levels, then `tail` positions.

    `view`: what of it their queries see.
    """

    levels: tuple[Level, ...]
    tail: int
    view: View


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """Lines [0, rows), `length` positions each, filled up where a row feeds fewer or none.

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
    across_seen: View


class Writes(NamedTuple):
    """The places of a bank where the keys and values of packed positions are written.

    `lines`, `places` (n,), of the packed positions `chosen` (n,); None: of all.
    """

    lines: Tensor
    places: Tensor
    chosen: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """`feeds` in packed order; `order` (N,): the feed-order place of each packed position, None if
    they are the same; `begins` (F,): where the feeds of the work begin among packed positions.

    `spans`: feeds that are computed together, of equal lengths and, if there are several, with
    nothing cached. `writes`: bank by bank.
    """

    feeds: tuple[PlannedFeed, ...]
    rectangle: Rectangle | None
    spans: tuple[tuple[PlannedFeed, ...], ...]
    order: np.ndarray | None
    begins: np.ndarray
    writes: tuple[Writes, ...]


def make_plan(rows: RowCache, work: Work) -> Plan:
    """Lay out a work whose verbs were applied.

    Afterwards every fed row has the length it will have when the step is over.
    """
    arrays = (work.rows, work.starts, work.counts, work.logits)
    numbers = zip(*(array.tolist() for array in arrays), strict=True)
    feeds = [_feed(rows, work, index, *four) for index, four in enumerate(numbers)]
    rows.make_room([feed.row for feed in feeds])
    short = sorted([f for f in feeds if not f.in_span], key=attrgetter("row.line"))
    long = [feed for feed in feeds if feed.in_span]
    packed = [*short, *long]
    indices, counts = [f.index for f in packed], [f.count for f in packed]
    begins = np.zeros_like(work.counts)
    begins[indices] = np.cumsum(counts) - counts
    for feed in packed:
        feed.offset = int(begins[feed.index])
    rows.mark([feed.row for feed in packed], counts, work.logits[indices].tolist())
    in_order = indices == list(range(len(feeds)))
    banks = range(len(rows.banks))
    return Plan(
        feeds=tuple(packed),
        rectangle=_rectangle(short, len(banks), rows.device) if short else None,
        spans=tuple(tuple(span) for _, span in groupby(long, _alike)),
        order=None if in_order else runs(work.offsets[indices], work.counts[indices]),
        begins=begins,
        writes=tuple(_writes(packed, bank, rows.device) for bank in banks),
    )


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return `counts` whole numbers from each of `starts` on, one run after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _feed(
    rows: RowCache, work: Work, index: int, number: int, start: int, count: int, wanted: int
) -> PlannedFeed:
    """Let the row hold `count` more positions, whose keys, values and states follow."""
    row, extra = rows[number], work.extras.get(index, _PLAIN)
    require_start(number, row, start)
    mask, weights = extra.mask, extra.attentions
    alone = rows.coded or weights or mask is not None
    before = rows.extend(row, count, wanted, alone=alone or count > LONGEST_IN_RECTANGLE)
    return PlannedFeed(index, row, start, count, before, row.parts, mask, weights, alone)


def require_start(number: int, row: CacheRow, start: int) -> None:
    """Raise InvariantError where a row is fed anywhere but after what it holds."""
    if row.length != start:
        what = f"row {number} is fed at the wrong place"
        raise InvariantError(what, wanted=row.length, got=start)


def _alike(feed: PlannedFeed) -> tuple[int, int]:
    """Return a key that is equal for neighbours that form one span."""
    return feed.count, feed.index if feed.alone or feed.start else -1


def _writes(packed: Sequence[PlannedFeed], bank: int, device: torch.device) -> Writes:
    tails = np.array([feed.after[bank].tail for feed in packed])
    counts = np.array([feed.count for feed in packed])
    kept = np.minimum(counts, tails)
    lines, places = np.repeat([feed.row.line for feed in packed], kept), runs(tails - kept, kept)
    chosen = None
    if len(places) < counts.sum():
        chosen = on_device(device, runs(np.cumsum(counts) - kept, kept))
    return Writes(on_device(device, lines), on_device(device, places), chosen)


def _rectangle(feeds: Sequence[PlannedFeed], banks: int, device: torch.device) -> Rectangle:
    rows, length = feeds[-1].row.line + 1, max(feed.count for feed in feeds)
    by_line: list[PlannedFeed | None] = [None] * rows
    for feed in feeds:
        by_line[feed.row.line] = feed
    gather, scatter = _filling(feeds, rows, length, device)
    # Places that are filled up count on.
    starts = np.array([feed.start if feed else 0 for feed in by_line])
    queries = starts[:, None] + np.arange(length)
    states = [feed.row.across if feed else None for feed in by_line]
    across, held = None, np.empty((rows, 0), dtype=bool)
    if any(states):
        links = [Link(segment, segment.length) if segment else None for segment in states]
        across, held = _level(links, device)
    return Rectangle(
        rows=rows,
        length=length,
        packed=sum(feed.count for feed in feeds),
        gather=gather,
        scatter=scatter,
        boxes=tuple(_box(by_line, queries, bank, device) for bank in range(banks)),
        across=across,
        across_seen=View(queries, queries, held[:, None, None], causal=False),
    )


def _box(
    by_line: Sequence[PlannedFeed | None], queries: np.ndarray, bank: int, device: torch.device
) -> Box:
    parts = [feed.after[bank] if feed else BankPart() for feed in by_line]
    chains = [part.chain for part in parts]
    starts, tails = (
        np.array([part.first for part in parts]),
        np.array([part.tail for part in parts]),
    )
    levels, keys, held = [], [], []
    for depth in range(max(map(len, chains))):
        links = [chain[depth] if depth < len(chain) else None for chain in chains]
        level, level_held = _level(links, device)
        levels.append(level)
        keys.append(starts[:, None] + np.arange(level.length))
        held.append(level_held)
        starts = starts + np.array([link.length if link else 0 for link in links])
    # What a filled-up place or an idle row sees is nothing or wrong, and is never used.
    run = np.arange(tails.max())
    keys.append(starts[:, None] + run)
    held.append(run < tails[:, None])
    places, there = np.concatenate(keys, axis=1), np.concatenate(held, axis=1)
    # One query after all keys sees every one of them, but for windows.
    causal = queries.shape[1] > 1
    exists = None if not causal and bool(there.all()) else there[:, None, None]
    return Box(tuple(levels), len(run), View(queries, places, exists, causal=causal))


def _filling(
    feeds: Sequence[PlannedFeed], rows: int, length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return `Rectangle.gather` and `Rectangle.scatter`."""
    counts = np.array([feed.count for feed in feeds])
    if len(feeds) == rows and counts.min() == length:
        return None, None
    scatter = runs(np.array([feed.row.line for feed in feeds]) * length, counts)
    gather = np.zeros(rows * length, dtype=np.int64)
    gather[scatter] = np.arange(len(scatter))
    return on_device(device, gather), on_device(device, scatter)


@dataclass(frozen=True, slots=True, eq=False)
class LevelArrays:
    """A level as numbers of the host: see `Level`. `held` (R,): how much of a segment each row
    looks at."""

    first: int
    last: int
    members: np.ndarray
    group: np.ndarray
    place: np.ndarray
    held: np.ndarray

    @classmethod
    def of(cls, links: Sequence[Link | None]) -> LevelArrays:
        """Return the level of one link per row at most, of which there is one at least."""
        lines = [link.segment.line for link in links if link is not None]
        first, last = min(lines), max(lines) + 1
        # A row without a link looks at the first line too, with weights that its mask makes zero.
        group = np.array([link.segment.line - first if link else 0 for link in links])
        place = np.zeros(len(links), dtype=np.int64)
        counts = np.bincount(group, minlength=last - first)
        members = np.zeros((last - first, counts.max()), dtype=np.int64)
        for line in range(last - first):
            rows = np.flatnonzero(group == line)
            place[rows] = np.arange(len(rows))
            members[line, : len(rows)] = rows
        held = np.array([link.length if link else 0 for link in links])
        return cls(first, last, members, group, place, held)


def _level(links: Sequence[Link | None], device: torch.device) -> tuple[Level, np.ndarray]:
    """Return the level of one link per row at most, and (rows, length) which keys are held."""
    one = LevelArrays.of(links)
    arrays = (on_device(device, array) for array in (one.members, one.group, one.place))
    length = int(one.held.max())
    level = Level(one.first, one.last, length, one.last - one.first == 1, *arrays)
    return level, np.arange(length) < one.held[:, None]
