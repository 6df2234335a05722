"""Readout: how the logits of a sequence and of its companions become one distribution."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: scale * (log p - log q) + log q, with the companion's q.

    Source: Sanchez et al. 2023; the reference's UnbatchedClassifierFreeGuidanceLogitsProcessor.
    """

    scale: float

    def mix(self, logits: Tensor, companions: list[Tensor]) -> Tensor:
        """(R, V) logits of the sequences and of their one companion -> (R, V)."""
        given = torch.log_softmax(logits, dim=-1)
        other = torch.log_softmax(companions[0], dim=-1)
        return self.scale * (given - other) + other
