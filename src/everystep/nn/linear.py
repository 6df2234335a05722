"""A linear map over the last dimension, stored the way this machine reads it fastest.

On a CPU with oneDNN a weight is kept in oneDNN's own blocked layout and multiplied by its kernels,
which stream it at one row and compute at many; elsewhere it is a plain (out, in) matrix. Which
names a weight has in a checkpoint, and which rows belong to which, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout oneDNN chooses for this many rows serves one row and hundreds as well (docs/log.md).
_PACKED_FOR_ROWS = 32
_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """`x @ weight.T + bias`; `weight`: (out, in), packed or plain; `bias`: (out,) or None.

    `onednn` says that oneDNN multiplies; it reads both layouts.
    """

    weight: Tensor
    bias: Tensor | None = None
    onednn: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual` (..., out) plus the map of `x` (..., in); `residual` stays as it is."""
        if self.onednn:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.weight, self.bias, "add"
            )
        return residual + F.linear(x, self.weight, self.bias)

    def dense(self) -> Tensor:
        """The weight as a plain (out, in) matrix; a copy if it is packed."""
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight


def packed_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A linear map with a layout of its own; `weight` (out, in) is not kept where it is packed."""
    if not runs_on_onednn(weight):
        return Linear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return Linear(packed, bias, onednn=True)


def shared_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A linear map that reads `weight` (out, in) where it lies, as a head tied to embeddings."""
    return Linear(weight, bias, onednn=runs_on_onednn(weight))


def runs_on_onednn(weight: Tensor) -> bool:
    """Whether oneDNN can multiply by this weight without emulating its type."""
    if weight.device.type != "cpu" or not _HAS_ONEDNN:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
