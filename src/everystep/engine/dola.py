"""DoLa: what the last layer says, contrasted with what an earlier one would have said.

Source: Chuang et al. 2023, "Decoding by Contrasting Layers Improves Factuality in Large Language
Models"; transformers' `_dola_decoding` of 4.55. There one layer is chosen for the whole batch,
here each row chooses its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.processors.guidance import highest
from everystep.types.protocols import Predictions, Readout

_SHARE = math.log(0.1)  # of the best probability that a token needs


@dataclass(frozen=True)
class DoLa:
    """log p - log q with q of the candidate layer that differs most from the last one, among the
    tokens of at least a tenth of the best probability; `then`: what is done to that."""

    layers: tuple[int, ...]
    then: Readout | None = None
    narrows: ClassVar[bool] = True

    def mix(self, given: Predictions) -> Tensor:
        """(R, V) logits and (n, R, V) those of the candidate layers -> (R, V)."""
        if given.early is None:
            raise InvariantError("the logits of earlier layers are missing")
        final, early = given.logits.float(), given.early.float()
        base = early[0] if len(early) == 1 else _furthest(final, early)
        known = final.log_softmax(dim=-1)
        few = known < highest(known, given.allowed) + _SHARE
        mixed = (known - base.log_softmax(dim=-1)).float().masked_fill(few, -torch.inf)
        return (
            mixed if self.then is None else self.then.mix(replace(given, logits=mixed, early=None))
        )


def _furthest(final: Tensor, early: Tensor) -> Tensor:
    """(R, V) per row the candidate of the highest Jensen-Shannon divergence from the last layer, of
    equals the first."""
    known, said = final.log_softmax(dim=-1), early.log_softmax(dim=-1)
    # Twice m = (p + q) / 2, without zeros, whose logarithm is none. What torch's exp makes of far
    # negative numbers takes ten times as long as its softmax.
    both = early.softmax(dim=-1).add_(final.softmax(dim=-1))
    both.clamp_(min=torch.finfo(both.dtype).tiny)
    # The sum of KL(m | p) and KL(m | q). In base 2, for which torch has the fastest logarithm.
    each = both.log2().sub_(1).mul_(2 * math.log(2)).sub_(said.add_(known))
    apart = both.mul_(each).sum(dim=-1)
    best = apart.argmax(dim=0)  # (R,)
    return early[best, torch.arange(len(best), device=best.device)]


def candidate_layers(asked: str | list[int], layers: int, *, tied: bool) -> tuple[int, ...]:
    """The layers that "low", "high" or a list stand for in a model of so many; 0 is what stands
    before the first one, which in a model with a `tied` head says the token that was read."""
    if isinstance(asked, list):
        return tuple(layer for layer in asked if 0 <= layer < layers)
    if asked == "high":
        return tuple(range(layers - 20 if layers > 40 else layers // 2, layers, 2))
    first = min(2, layers - 1) if tied else 0
    end = 20 if layers > 40 else layers // 2
    return tuple(range(first, end, 2)) or (first,)
