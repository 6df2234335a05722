"""Readout: how the logits of a sequence and of its companions become one distribution."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from everystep.processors.guidance import guided


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: scale * (log p - log q) + log q, with the companion's q.

    Source: Sanchez et al. 2023; the reference's UnbatchedClassifierFreeGuidanceLogitsProcessor.
    """

    scale: float

    def mix(self, logits: Tensor, companions: list[Tensor]) -> Tensor:
        """(R, V) logits of the sequences and of their one companion -> (R, V)."""
        return guided(logits, companions[0], self.scale)
