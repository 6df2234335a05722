"""What a step shows to whoever asked: scores, choices and captured states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from everystep.types import Children, Group, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """What one sequence's feed returned beside logits: layers and attentions, layer by layer.

    `layers`: (T, E) each; `attentions`: (H, T, S) each; `cross_attentions`: (H, T, S) each.
    """

    layers: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """What one kind of strategy saw and chose in one step; made only when somebody asked.

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
