"""Readout: what is read of a step's logits, and how those of companions become one distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from everystep.processors.guidance import guided
from everystep.processors.pipeline import enough as few
from everystep.types import MOST_BEST, Best, Request


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: scale * (log p - log q) + log q, with the companion's q.

    Source: Sanchez et al. 2023; the reference's UnbatchedClassifierFreeGuidanceLogitsProcessor.
    """

    scale: float

    def mix(self, logits: Tensor, companions: list[Tensor]) -> Tensor:
        """(R, V) logits of the sequences and of their one companion -> (R, V)."""
        return guided(logits, companions[0], self.scale)


def enough(request: Request, vocabulary: int) -> int:
    """How many of the best logits of a row decide everything that the request asks of it; 0 where
    the whole row is read."""
    wants = request.wants
    if request.readout is not None or wants.history:
        return 0
    if wants.logprobs is not None or wants.prompt_logprobs is not None:
        return 0
    count = _of_scores(request, vocabulary)
    return count if count <= MOST_BEST else 0


def _of_scores(request: Request, vocabulary: int) -> int:
    """How many of the best scores the processors and the strategy have to see; 0 for all."""
    reads = request.strategy.reads
    if reads.shortlists:
        whole = reads.scores != "logits" or request.draws.whole_rows
        return 0 if whole else few(request.processors, vocabulary)
    return 0 if request.processors else reads.best


def log_probs(scores: Tensor, totals: Tensor | None) -> Tensor:
    """(R, V) logits -> log-probabilities, with the (R,) totals where an executor told them.

    Subtracting these is what is done to the best of a row too, so that both are the same bits.
    """
    return torch.log_softmax(scores, dim=-1) if totals is None else scores - totals[:, None]


def best_scores(best: Best, *, log_probs: bool) -> Best:
    """The best logits of rows, as the log-probabilities that a strategy asks for."""
    if not log_probs:
        return best
    totals = cast(np.ndarray, best.totals)
    return Best(best.values - totals[:, None], best.tokens)
