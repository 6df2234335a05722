"""Readout: what is read of a step's logits, and how those of companions become one distribution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everystep.processors.guidance import guided
from everystep.processors.pipeline import best_read
from everystep.types import MOST_BEST, Request


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: scale * (log p - log q) + log q, with the companion's q.

    Source: Sanchez et al. 2023; the reference's UnbatchedClassifierFreeGuidanceLogitsProcessor.
    """

    scale: float

    def mix(self, logits: Tensor, companions: list[Tensor]) -> Tensor:
        """(R, V) logits of the sequences and of their one companion -> (R, V)."""
        return guided(logits, companions[0], self.scale)


def best_needed(request: Request, vocabulary: int) -> int:
    """How many of the best logits of a row decide everything that the request asks of it; 0 where
    the whole row is read."""
    wants, reads = request.wants, request.strategy.reads
    likelihoods = wants.logprobs is not None or wants.prompt_logprobs is not None
    if request.readout is not None or wants.history or likelihoods:
        return 0
    if not request.processors:
        count = reads.best
    elif reads.shortlists and reads.scores == "logits" and not request.draws.whole_rows:
        count = best_read(request.processors, vocabulary)
    else:
        count = 0
    return count if count <= MOST_BEST else 0
