"""What a step reports on request: scores, choices and captured states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from everystep.types import Answer, Children, Group, Sequence


@dataclass(slots=True)
class Counts:
    """What the engine has done so far; deterministic, so that tests can check it."""

    steps: int = 0
    forwards: int = 0
    fed: int = 0
    chunks: int = 0
    syncs: int = 0
    preemptions: int = 0
    preemptions_in_decode: int = 0
    long_children: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What one sequence's feed of `count` positions from `start` on returned beside logits."""

    start: int
    count: int
    answer: Answer

    def cut(self, first: int, last: int) -> Capture:
        """What a feed of [first, last) of these positions would have returned."""
        after = self.count - last
        layers, own = self.answer.layers, self.answer.attentions
        across = self.answer.cross_attentions
        answer = Answer(
            layers=layers and tuple(one[first:last] for one in layers),
            attentions=own and tuple(one[:, first:last, : one.shape[-1] - after] for one in own),
            cross_attentions=across and tuple(one[:, first:last] for one in across),
        )
        return Capture(self.start + first, last - first, answer)

    def per_token(self, rows: int, accepted: int) -> list[Capture]:
        """One capture per accepted row: `rows` of the positions, the last ones, were read out."""
        ends = range(self.count - rows + 1, self.count - rows + 1 + accepted)
        return [self.cut(end - 1 if i else 0, end) for i, end in enumerate(ends)]


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """What one kind of strategy saw and chose in one step; made only on request.

    `sequences`: S entries; row r of `logits` and `scores` ((R, V)) belongs to
    `sequences[row_sequence[r]]`. `group_of`: (S,) index into `groups`.
    """

    groups: tuple[Group, ...]
    sequences: tuple[Sequence, ...]
    group_of: np.ndarray
    row_sequence: np.ndarray
    logits: Tensor
    scores: Tensor
    children: Children
    captures: Mapping[int, Capture]
