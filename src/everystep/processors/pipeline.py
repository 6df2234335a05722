"""Runs the processors of all rows of a step, in as few calls as their parameters allow.

Rows of one request, and of requests that share a tuple of processors, run as one. Otherwise it goes
slot by slot of the canonical order: equal processors in one call, and different ones of a class
with `stack` as one instance with a parameter per row. A tuple in another order runs by itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from everystep.processors.base import Processor
from everystep.processors.order import RANK
from everystep.processors.user import User
from everystep.types import Rows

Processors = tuple[Processor, ...]
_USER = RANK[User]


def apply(rows: Rows, scores: Tensor) -> Tensor:
    """(R, V) scores -> (R, V) scores, each row processed as its own request asks; no argument is
    changed."""
    shared = rows.sequences[0].request.processors
    for sequence in rows.sequences:
        if sequence.request.processors is not shared:
            return _apply_mixed(rows, scores)
    for processor in shared:
        scores = processor(rows, scores)
    return scores


@dataclass(slots=True)
class _Canvas:
    """The scores so far; `owned` says that they may be written to in place."""

    rows: Rows
    scores: Tensor
    owned: bool = False

    def run(self, processors: Processors, indices: list[int]) -> None:
        """The processors, one after another, on the given rows."""
        if len(indices) == len(self.rows) and indices == sorted(indices):
            for processor in processors:
                self.scores = processor(self.rows, self.scores)
                self.owned = False
            return
        chosen = np.array(indices)
        at = torch.from_numpy(chosen).to(self.scores.device)
        part, part_rows = self.scores[at], self.rows.select(chosen)
        for processor in processors:
            part = processor(part_rows, part)
        if not self.owned:
            self.scores, self.owned = self.scores.clone(), True
        self.scores[at] = part


@dataclass(slots=True)
class _Slot:
    """All processors of one rank: per distinct value of them the rows that have it."""

    members: dict[Hashable, tuple[Processors, list[int]]] = field(default_factory=dict)

    def add(self, processors: Processors, indices: list[int]) -> None:
        self.members.setdefault(_identity(processors), (processors, []))[1].extend(indices)

    def run(self, canvas: _Canvas) -> None:
        groups = list(self.members.values())
        stack = getattr(type(groups[0][0][0]), "stack", None)
        if len(groups) == 1 or stack is None:
            for processors, indices in groups:
                canvas.run(processors, sorted(indices))
            return
        owner = sorted(
            ((i, processors[0]) for processors, ids in groups for i in ids),
            key=lambda entry: entry[0],
        )
        canvas.run((stack([one for _, one in owner]),), [i for i, _ in owner])


def _apply_mixed(rows: Rows, scores: Tensor) -> Tensor:
    canvas = _Canvas(rows, scores)
    slots: dict[int, _Slot] = {}
    for processors, indices in _by_tuple(rows):
        ranks = [RANK.get(type(processor), _USER) for processor in processors]
        if not _is_canonical(ranks):
            canvas.run(processors, indices)
            continue
        for rank in dict.fromkeys(ranks):
            same = tuple(p for p, r in zip(processors, ranks, strict=True) if r == rank)
            slots.setdefault(rank, _Slot()).add(same, indices)
    for rank in sorted(slots):
        slots[rank].run(canvas)
    return canvas.scores


def _by_tuple(rows: Rows) -> list[tuple[Processors, list[int]]]:
    """Each distinct tuple object with its rows."""
    found: dict[int, tuple[Processors, list[int]]] = {}
    for r, sequence in enumerate(rows.sequences):
        processors = sequence.request.processors
        found.setdefault(id(processors), (processors, []))[1].append(r)
    return list(found.values())


def _is_canonical(ranks: list[int]) -> bool:
    """Whether the ranks rise, and none but the caller's own occurs twice."""
    return all(a < b or a == b == _USER for a, b in pairwise(ranks))


def _identity(processors: Processors) -> Hashable:
    """Equal for processors that may run in one call."""
    try:
        hash(processors)
    except TypeError:
        return tuple(id(processor) for processor in processors)
    return processors
