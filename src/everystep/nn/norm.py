"""Normalisation over the last dimension: by root mean square, or to mean 0 and variance 1.

The result has the type of the input. Root mean squares are taken in float32, in float64 models too,
because the reference does so: it is the one rounding that would keep float64 results from being
comparable. A norm knows nothing of the block it stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """`weight`, `bias`: (E,). `plus_one`: the scale is 1 + weight, applied in float32 (Gemma)."""

    kind: NormKind
    eps: float
    weight: Tensor
    bias: Tensor | None = None
    plus_one: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """(..., E) -> (..., E)."""
        shape = self.weight.shape
        if self.kind == "layer":
            return F.layer_norm(x, shape, self.weight, self.bias, self.eps)
        if x.dtype == torch.float32 or not (self.plus_one or x.dtype == torch.float64):
            weight = 1.0 + self.weight if self.plus_one else self.weight
            return F.rms_norm(x, shape, weight, self.eps)
        return self._in_float32(x)

    def _in_float32(self, x: Tensor) -> Tensor:
        """The reference's own order of operations, which rounds where it does."""
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (exact * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * exact.to(x.dtype)
