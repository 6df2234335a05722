"""The few tokens of each row that can still be chosen, in place of a row as wide as the vocabulary.

Where processors have left few tokens, everything behind them works on those. How they are found is
not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """Scores of R rows, all of which is above -inf.

    `tokens`: (R, n) ids, rising within a row; `scores`: (R, n), -inf where a row has no more.
    `vocabulary`: V.
    """

    tokens: Tensor
    scores: Tensor
    vocabulary: int

    def __len__(self) -> int:
        return len(self.tokens)

    def dense(self) -> Tensor:
        """(R, V) the same scores, written out."""
        full = self.scores.new_full((len(self), self.vocabulary), -math.inf)
        row, place = torch.nonzero(self.scores != -math.inf, as_tuple=True)
        full[row, self.tokens[row, place]] = self.scores[row, place]
        return full


def dense(scores: Tensor | Shortlist) -> Tensor:
    """(R, V) the scores as they are, or written out."""
    return scores.dense() if isinstance(scores, Shortlist) else scores
