"""The few tokens of each row that can still be chosen, in place of a row as wide as the vocabulary.

Where processors have left few tokens, everything behind them works on those. A list may also be the
best of a row of which nothing else was told: then it knows what the rest cannot exceed. How tokens
are found is not known here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class UndecidedError(Exception):
    """What was told of a row does not decide its scores; whoever told it has to tell all of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Shortlist:
    """Scores of R rows, all of which is above -inf.

    `tokens`: (R, n) ids, rising within a row; `scores`: (R, n), -inf where a row has no more.
    `vocabulary`: V. `rest`: (R, 1) what no other token of the row exceeds, or None for -inf.
    """

    tokens: Tensor
    scores: Tensor
    vocabulary: int
    rest: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def select(self, rows: Tensor) -> Shortlist:
        """The given rows, (n,), in the given order."""
        rest = None if self.rest is None else self.rest[rows]
        return Shortlist(self.tokens[rows], self.scores[rows], self.vocabulary, rest)

    def put(self, rows: Tensor, part: Shortlist) -> Shortlist:
        """The same lists but for the given rows, (n,), which are those of `part`."""
        size = (len(self), max(self.tokens.shape[1], part.tokens.shape[1]))
        tokens, scores = self.tokens.new_zeros(size), self.scores.new_empty(size)
        rest = self.scores.new_empty(len(self), 1)
        for at, one in ((slice(None), self), (rows, part)):
            held = one.tokens.shape[1]
            scores[at] = -math.inf
            tokens[at, :held], scores[at, :held] = one.tokens, one.scores
            rest[at] = -math.inf if one.rest is None else one.rest
        return Shortlist(tokens, scores, self.vocabulary, rest)

    def dense(self) -> Tensor:
        """(R, V) the same scores, written out; UndecidedError if others may be above -inf."""
        if self.rest is not None and bool((self.rest > -math.inf).any()):
            raise UndecidedError
        full = self.scores.new_full((len(self), self.vocabulary), -math.inf)
        row, place = torch.nonzero(self.scores != -math.inf, as_tuple=True)
        full[row, self.tokens[row, place]] = self.scores[row, place]
        return full


def dense(scores: Tensor | Shortlist) -> Tensor:
    """(R, V) the scores as they are, or written out."""
    return scores.dense() if isinstance(scores, Shortlist) else scores
