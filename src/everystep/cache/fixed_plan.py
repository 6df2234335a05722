"""Plans of a fixed shape, for steps that feed one position to each of their rows.

What such a plan says of a step are numbers in one array, the sheet. A plan on the same array of the
device reads them anew whenever its operators run again, so that they can be recorded once and
replayed. Sizes are rounded up to a few: rows that are not there and positions that nobody holds are
computed too, and nothing looks at them.

A line whose row is fed nothing, or that has none, writes to the place after its tail, which is
written again before a query sees it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.cache.bank import Bank
from everystep.cache.plan import Box, Level, LevelArrays, Plan, Rectangle, Writes, require_start
from everystep.cache.pool import Link
from everystep.cache.rows import CacheRow, RowCache
from everystep.nn.attention import View
from everystep.types import Work

MOST_LINES = 256
_LEAST_POSITIONS = 64


@dataclass(frozen=True, slots=True)
class FixedLevel:
    """The sizes of a level: lines [first, last) of a shelf, `length` positions, `width` members."""

    first: int
    last: int
    length: int
    width: int

    @property
    def members(self) -> int:
        """The number of members of all its lines."""
        return (self.last - self.first) * self.width


@dataclass(frozen=True, slots=True)
class FixedBox:
    """The sizes of what rows look at in a bank: levels, then `tail` positions."""

    levels: tuple[FixedLevel, ...]
    tail: int


@dataclass(frozen=True, slots=True)
class FixedShape:
    """The sizes of a step: its lines, the position ids of each, and bank by bank its boxes."""

    lines: int
    axes: int
    boxes: tuple[FixedBox, ...]

    def sizes(self) -> Iterator[int]:
        """Yield the lengths of the arrays of a sheet, in order."""
        yield from (self.lines, self.lines, self.lines, self.axes * self.lines)
        for box in self.boxes:
            yield from (self.lines, self.lines)
            for level in box.levels:
                yield from (self.lines, self.lines, self.lines, level.members)


@dataclass(frozen=True, slots=True, eq=False)
class FixedStep:
    """A step whose numbers lie in a sheet.

    `order` (lines,): the line of each feed; `tokens` (lines,) and `positions` (lines,), or (axes,
    lines), line by line.
    """

    order: Tensor
    tokens: Tensor
    positions: Tensor
    plan: Plan


def lay_out(rows: RowCache, work: Work, places: np.ndarray) -> tuple[FixedShape, np.ndarray]:
    """Return the shape and the sheet of a work that feeds one position to each of its rows.

    Its verbs were applied. `places`: (F,) or (axes, F) position ids. Afterwards each fed row has
    the length it will have when the step is over.
    """
    fed = [rows[number] for number in work.rows.tolist()]
    for number, row, start in zip(work.rows.tolist(), fed, work.starts.tolist(), strict=True):
        require_start(number, row, start)
        rows.extend(row, 1, 1, alone=False)
    rows.make_room(fed)
    lines = _rounded_lines(len(rows.lines))
    at = np.array([row.line for row in fed])
    by_line = np.zeros((3 + places.size // len(fed), lines), dtype=np.int64)
    by_line[0, : len(fed)] = at
    by_line[1, at], by_line[2, at], by_line[3:, at] = work.tokens, work.starts, places
    own: list[CacheRow | None] = [None] * lines
    for row in fed:
        own[row.line] = row
    boxes, arrays = [], [by_line.ravel()]
    for index, bank in enumerate(rows.banks):
        box, numbers = _box(bank, index, own, rows.lines)
        boxes.append(box)
        arrays += numbers
    return FixedShape(lines, len(by_line) - 3, tuple(boxes)), np.concatenate(arrays)


def _box(
    bank: Bank, index: int, own: Sequence[CacheRow | None], held: Sequence[CacheRow | None]
) -> tuple[FixedBox, list[np.ndarray]]:
    """Return the sizes and numbers of a bank.

    `own`: the fed row of each line. `held`: the row of each line in use.
    """
    writes = np.zeros(len(own), dtype=np.int64)
    for line, row in enumerate(held):
        if row is not None:
            writes[line] = row.parts[index].tail - (own[line] is not None)
    tail = _rounded_positions(int(writes.max()) + 1)
    bank.tails.reserve(len(own), tail)
    for line, place in enumerate(writes.tolist()):
        bank.tails.touch(line, place + 1)
    parts = [None if row is None else row.parts[index] for row in own]
    arrays = [writes, np.array([part.first if part else 0 for part in parts], dtype=np.int64)]
    chains = [part.chain if part else () for part in parts]
    levels = []
    for depth in range(max(map(len, chains))):
        links = [chain[depth] if depth < len(chain) else None for chain in chains]
        level, numbers = _level(links)
        levels.append(level)
        arrays += numbers
    return FixedBox(tuple(levels), tail), arrays


def _level(links: Sequence[Link | None]) -> tuple[FixedLevel, list[np.ndarray]]:
    one = LevelArrays.of(links)
    length = _rounded_positions(int(one.held.max()))
    level = FixedLevel(one.first, one.last, length, one.members.shape[1])
    return level, [one.held, one.group, one.place, one.members.ravel()]


def _rounded_lines(count: int) -> int:
    """Return 1 to 4, or the next multiple of 4, of 16 above 32."""
    step = 1 if count <= 4 else 4 if count <= 32 else 16
    return -(-count // step) * step


def _rounded_positions(count: int) -> int:
    """Return the next multiple of 64, or of an eighth of the power of two from `count` on; no
    capacity of a pool is exceeded so, as all are powers of two of that."""
    step = max(_LEAST_POSITIONS, (1 << (count - 1).bit_length()) // 8)
    return -(-count // step) * step


def fixed_step(shape: FixedShape, sheet: Tensor) -> FixedStep:
    """Return the step whose numbers lie in `sheet`; operators make of them what depends on them."""
    parts = iter(torch.split(sheet, [*shape.sizes()]))
    order, tokens, queries, places = (next(parts) for _ in range(4))
    writes, boxes = [], []
    for box in shape.boxes:
        at, first = next(parts), next(parts)
        writes.append(Writes(torch.arange(shape.lines, device=sheet.device), at, None))
        boxes.append(_box_of(box, queries, first, parts))
    nothing = View(queries[:, None], queries[:, None], causal=False)
    rectangle = Rectangle(shape.lines, 1, shape.lines, None, None, tuple(boxes), None, nothing)
    plan = Plan((), rectangle, (), None, np.empty(0, dtype=np.int64), tuple(writes))
    positions = places if shape.axes == 1 else places.view(shape.axes, shape.lines)
    return FixedStep(order, tokens, positions, plan)


def _box_of(box: FixedBox, queries: Tensor, first: Tensor, parts: Iterator[Tensor]) -> Box:
    """Return the box, whose numbers come next: a level's, then those of the levels after it."""
    starts, levels, keys, seen = first[:, None], [], [], []
    for one in box.levels:
        held, group, place, members = (next(parts) for _ in range(4))
        run = torch.arange(one.length, device=first.device)
        keys.append(starts + run)
        seen.append(run < held[:, None])
        starts = starts + held[:, None]
        lines = one.last - one.first
        shared = members.view(lines, one.width), group, place
        levels.append(Level(one.first, one.last, one.length, lines == 1, *shared))
    run = torch.arange(box.tail, device=first.device)
    # What lies after the query in its own tail is not seen, as the view is causal.
    keys.append(starts + run)
    seen.append(torch.ones_like(keys[-1], dtype=torch.bool))
    exists = torch.cat(seen, dim=1)[:, None, None] if levels else None
    return Box(tuple(levels), box.tail, View(queries[:, None], torch.cat(keys, dim=1), exists))
