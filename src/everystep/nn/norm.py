"""Normalisation over the last dimension: by root mean square, or to mean 0 and variance 1.

The result has the type of the input. Root mean squares are taken in float32, in float64 models too,
because transformers does so: it is the one rounding that would keep float64 results from being
comparable. A norm knows nothing of the block it stands in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.nn.places import places_among

NormKind = Literal["rms", "rms_t5", "layer"]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """`weight`, `bias`: (E,). `plus_one`: the scale is 1 + weight, applied in float32 (Gemma).

    `others`: norms of the same kind for some of the N positions that are normalised, each with the
    positions (n,); no position has two.
    """

    kind: NormKind
    eps: float
    weight: Tensor
    bias: Tensor | None = None
    plus_one: bool = False
    others: tuple[tuple[Tensor, Norm], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise (..., E) -> (..., E); (N, ..., E) where positions differ."""
        found = self._normalised(x)
        for places, other in self.others:
            found = found.index_copy(0, places, other(x[places]))
        return found

    def at(self, places: Tensor) -> Norm:
        """Return the norm for a call that reads only these (n,) of the positions that it was made
        for."""
        if not self.others:
            return self
        each = ((places_among(own, places)[1], other) for own, other in self.others)
        return replace(self, others=tuple((here, other) for here, other in each if len(here)))

    def _normalised(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if self.kind == "rms" and x.is_cuda and not self.plus_one and x.dtype != torch.float64:
            # One kernel in place of eight, which rounds once, where transformers rounds twice.
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        exact = x.float()
        scale = exact.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        # T5 rounds the scale to float32 and nothing else, which shows in float64 only.
        exact = (x if self.kind == "rms_t5" else exact) * scale
        if self.plus_one:
            return exact.mul_(1.0 + self.weight.float()).to(x.dtype)
        return self.weight * exact.to(x.dtype)
