"""A linear map over the last dimension, stored as plain values or packed.

Plain storage is a float (out, in) matrix: it is differentiable, and a weight that requires
gradients is always stored so. Packed storage is a frozen copy in the layout that this machine reads
fastest, and refuses gradients. On a CPU with oneDNN a float weight is packed into oneDNN's blocked
layout, whose kernels are fast for one row and for many. A quantised weight stays as it is and meets
activations that are rounded to 8 bits first, as docs/decisions/009 defines. Panels are read where
they lie, because the native executor reads them too. Which names a weight has in a checkpoint, and
which rows belong to which, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.errors import UnsupportedError
from everystep.nn.panels import Panels
from everystep.nn.quantized import BLOCK, QuantizedWeight

Rows = Tensor | QuantizedWeight
"""A (rows, columns) matrix that lies row by row."""

Weight = Rows | Panels
Matrix = Weight | tuple[Weight, ...]
"""A (rows, columns) matrix; several where the rows lie in weights of different formats."""

# The layout oneDNN chooses for this many rows serves one row and hundreds as well (docs/log.md).
_PACKED_FOR_ROWS = 32
_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
# Up to here a product per panel is faster than taking panels apart.
_FEW_ROWS = 32
# Values taken apart at a time. With 1 << 18 the many small products cost more than the cache saves:
# 64 to 1,000 rows take 5 to 30 % longer, on one thread and on two (docs/log.md).
_STRETCH_VALUES = 1 << 20


class LinearMap:
    """`x @ weight.T + bias`, however the weight is stored; `bias`: (out,) or None."""

    __slots__ = ()
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., in) -> (..., out)."""
        raise NotImplementedError

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return `residual` (..., out) plus the map of `x` (..., in); `residual` stays as it is."""
        return residual + self(x)

    def at(self, places: Tensor) -> LinearMap:
        """Return the map for a call that reads only these (n,) of the positions that it was made
        for; itself where all positions are mapped alike."""
        return self

    def matrix(self) -> Matrix:
        """Return the weight, (out, in), as it was given; a copy if oneDNN's layout holds it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Linear(LinearMap):
    """A float weight; `weight`: (out, in), packed or plain; `bias`: (out,) or None.

    `onednn` says that oneDNN multiplies, which reads both layouts and has no gradients.
    """

    weight: Tensor
    bias: Tensor | None = None
    onednn: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.onednn:
            refuse_gradients(x, self.weight, self.bias)
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.onednn:
            refuse_gradients(x, residual, self.weight, self.bias)
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self.weight, self.bias, "add"
            )
        return residual + F.linear(x, self.weight, self.bias)

    def matrix(self) -> Tensor:
        return self.weight.to_dense() if self.weight.is_mkldnn else self.weight


@dataclass(frozen=True, slots=True, eq=False)
class PanelLinear(LinearMap):
    """Values in panels, which meet float32 activations as float32."""

    weight: Panels
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        refuse_gradients(x, self.bias)
        rows = x.reshape(-1, self.weight.columns)
        if len(rows) > _FEW_ROWS or self.weight.floats != torch.float32:
            return _biased(_by_stretches(x, self.weight), self.bias)
        # (panels, N, 16): a product per panel, whose outputs then stand side by side.
        products = torch.matmul(rows, self.weight.values())
        out = products.transpose(0, 1).flatten(1)[:, : self.weight.rows]
        return _biased(out.reshape(*x.shape[:-1], self.weight.rows), self.bias)

    def matrix(self) -> Panels:
        return self.weight


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedLinear(LinearMap):
    """A quantised weight, dequantised stretch by stretch, and float32 activations.

    `exact_activations`: they are multiplied as they are instead of being rounded to 8 bits.
    """

    weight: QuantizedWeight | Panels
    bias: Tensor | None = None
    exact_activations: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        refuse_gradients(x, self.bias)
        read = x if self.exact_activations else rounded_activations(x)
        return _biased(_by_stretches(read, self.weight), self.bias)

    def matrix(self) -> QuantizedWeight | Panels:
        return self.weight


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLinear(LinearMap):
    """Maps of one input whose outputs stand side by side; the bias is that of all of them."""

    parts: tuple[LinearMap, ...]
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return _biased(torch.cat([part(x) for part in self.parts], dim=-1), self.bias)

    def matrix(self) -> Matrix:
        return tuple(one for part in self.parts for one in weights_of(part.matrix()))


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide(LinearMap):
    """Plain maps of one input that learn, whose outputs stand side by side."""

    parts: tuple[Linear, ...]

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """(out,) those of the parts, 0 where one has none; None where all have none."""
        if all(one.bias is None for one in self.parts):
            return None
        each = [(one.weight.new_zeros(len(one.weight)), one.bias) for one in self.parts]
        return torch.cat([zeros if bias is None else bias for zeros, bias in each])

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def matrix(self) -> Matrix:
        return tuple(part.weight for part in self.parts)


def packed_linear(
    weight: Matrix, bias: Tensor | None = None, *, exact_activations: bool = False
) -> LinearMap:
    """Make a linear map with a layout of its own; a float `weight` that is packed is not kept."""
    if isinstance(weight, tuple):
        parts = (packed_linear(one, exact_activations=exact_activations) for one in weight)
        return JoinedLinear(tuple(parts), bias)
    if not isinstance(weight, Tensor) or not runs_on_onednn(weight):
        return shared_linear(weight, bias, exact_activations=exact_activations)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return Linear(packed, bias, onednn=True)


def shared_linear(
    weight: Weight, bias: Tensor | None = None, *, exact_activations: bool = False
) -> LinearMap:
    """Make a linear map that reads `weight` (out, in) where it lies, as a head tied to a table."""
    if isinstance(weight, Tensor):
        return Linear(weight, bias, onednn=runs_on_onednn(weight))
    if isinstance(weight, Panels) and weight.format is None:
        return PanelLinear(weight, bias)
    return QuantizedLinear(weight, bias, exact_activations)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raise UnsupportedError if a gradient would have to pass from packed weights to a tensor."""
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors):
        raise UnsupportedError(
            "packed weights are a frozen copy, and no gradient passes through them",
            wanted="plain float weights, or inputs that require no gradient",
            do="Call model.requires_grad_(), or compute under torch.no_grad()",
        )


def runs_on_onednn(weight: Tensor) -> bool:
    """Return whether oneDNN can multiply by this weight without emulating its type.

    It cannot by one that requires gradients.
    """
    if weight.device.type != "cpu" or not _HAS_ONEDNN or weight.requires_grad:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def rounded_activations(x: Tensor) -> Tensor:
    """Return (..., in) float32, every 32 inputs rounded to 255 steps of their largest magnitude.

    The step is that magnitude / 127, both float32, a number of steps is rounded to the nearest,
    halves to even. A block of zeros stays so; one that is not finite gives nothing finite. Of
    inputs that are not whole blocks the last is shorter.
    """
    missing = -x.shape[-1] % BLOCK
    whole = F.pad(x, (0, missing)) if missing else x
    blocks = whole.unflatten(-1, (-1, BLOCK))  # type: ignore[no-untyped-call]
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / torch.where(steps == 0, 1, steps)).round_().clamp_(-127, 127)
    return codes.mul_(steps).flatten(-2)[..., : x.shape[-1]]


def look_up(table: Weight, tokens: Tensor) -> Tensor:
    """Look up ids (...,) in a (rows, columns) table -> (..., columns).

    The result is float32 unless the table is a tensor of another type.
    """
    if isinstance(table, Tensor):
        return F.embedding(tokens, table)
    return dense(table.gather(tokens.flatten())).float().view(*tokens.shape, table.columns)


def joined(weights: Sequence[Rows]) -> Rows | tuple[Rows, ...]:
    """Join the weights below each other where their formats allow; else leave them as they are."""
    quantised = [one for one in weights if isinstance(one, QuantizedWeight)]
    if len(quantised) == len(weights) and all(map(quantised[0].alike, quantised)):
        return QuantizedWeight.cat(quantised)
    return weights[0] if len(weights) == 1 else tuple(weights)


def rows_of(weight: Weight, start: int, stop: int) -> Rows:
    """Return rows `start` to `stop`, as views without gradients; copies of those of panels."""
    return weight[start:stop].detach() if isinstance(weight, Tensor) else weight.slice(start, stop)


def dense_rows(weight: Weight, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop` as values without gradients, (rows, columns)."""
    if isinstance(weight, Panels):
        return weight.dense(start, stop)
    return dense(rows_of(weight, start, stop))


def weights_of(matrix: Matrix) -> tuple[Weight, ...]:
    """Return the weights that make up a matrix, from the first row on."""
    return matrix if isinstance(matrix, tuple) else (matrix,)


def dense(matrix: Matrix) -> Tensor:
    """Return a matrix as float values, (rows, columns); itself if it is that."""
    if isinstance(matrix, Tensor):
        return matrix
    if isinstance(matrix, QuantizedWeight):
        return matrix.dequantize()
    if isinstance(matrix, Panels):
        return dense(matrix.slice(0, matrix.rows))
    return torch.cat([dense(one) for one in matrix])


def _by_stretches(x: Tensor, weight: QuantizedWeight | Panels) -> Tensor:
    """Map (..., in) -> (..., out), with few rows of the weight at a time as values."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], weight.rows)
    step = max(1, _STRETCH_VALUES // weight.columns)
    starts = range(0, weight.rows, step)
    stretches = (dense_rows(weight, start, min(start + step, weight.rows)) for start in starts)
    return torch.cat([shared_linear(one.to(x.dtype))(x) for one in stretches], dim=-1)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)
