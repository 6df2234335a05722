"""A few new scores as data: where they stand in the flat scores, and what they become.

Writing an edit costs what it holds, not what the vocabulary is wide; who owns the scores writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Edit:
    """`index`: (C,) places in the scores, row after row. `value`: (C,) what stands there, or one
    number. A place that occurs twice has the same value both times."""

    index: Tensor
    value: Tensor | float

    def written(self, scores: Tensor) -> Tensor:
        """The contiguous scores, changed in place."""
        scores.view(-1).scatter_(0, self.index, self.value)
        return scores


def places(scores: Tensor, row: np.ndarray, token: np.ndarray) -> Tensor:
    """(C,) flat places of tokens in rows, (C,) both or of shapes that go together.

    Ids that no score belongs to are left out.
    """
    size = scores.shape[-1]
    index = row * size + token
    if token.size and (token.max() >= size or token.min() < 0):
        index = index[np.broadcast_to((token >= 0) & (token < size), index.shape)]
    return torch.from_numpy(index.reshape(-1)).to(scores.device)


def banned(scores: Tensor, row: np.ndarray, token: np.ndarray) -> Edit | None:
    """-inf at the given tokens of rows; None if there are none."""
    index = places(scores, row, token)
    return Edit(index, -math.inf) if len(index) else None


def banned_in(scores: Tensor, which: np.ndarray, tokens: tuple[int, ...]) -> Edit | None:
    """-inf at the same tokens of every row where `which`, (R,) bool, holds."""
    if not tokens or not which.any():
        return None
    return banned(scores, np.flatnonzero(which)[:, None], np.array(tokens))
