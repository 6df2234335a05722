"""Weights as the library reads them: in panels, beside structures that point to them.

Weights that a model holds in panels are read where they lie; others are packed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everystep.executors.native.library import LinearMapC, Matrix, MlpWeights, NormWeights, load
from everystep.nn.linear import LinearMap, Weight, rows_of, weights_of
from everystep.nn.norm import Norm
from everystep.nn.panels import Arena, Panels

ACTIVATIONS = {
    "silu": 0,
    "swish": 0,
    "gelu_new": 1,
    "gelu_fast": 1,
    "gelu_pytorch_tanh": 1,
    "gelu": 2,
    "relu": 3,
}
"""The numbers that `cpp/model.h` has for them."""
NORMS = {"rms": 0, "rms_t5": 0, "layer": 1}
"""Likewise; what tells the first two apart shows in float64 only."""


class Packing:
    """Keeps alive what the structures that it makes point to.

    `arena`: where the panels lie that the model does not hold itself.
    """

    def __init__(self) -> None:
        self.alive: list[object] = []
        self.arena = Arena()

    def mlp(self, up: LinearMap, down: LinearMap, size: int, *, gated: bool) -> MlpWeights:
        """Pack an MLP of `size` inner values; the rows of a gate come before those of `up`."""
        rows, bias = weights_of(up.matrix()), up.bias
        gate: tuple[Weight, ...] = ()
        gate_bias: Tensor | None = None
        if gated:
            gate, rows = _rows(rows, 0, size), _rows(rows, size, 2 * size)
            if bias is not None:
                gate_bias, bias = bias[:size], bias[size:]
        return MlpWeights(
            gate=self.joined([*map(self.matrix, gate)], gate_bias),
            up=self.joined([*map(self.matrix, rows)], bias),
            down=self.linear(down),
        )

    def linear(self, linear: LinearMap, bias: Tensor | None = None) -> LinearMapC:
        """Pack a map of one or more weights; `bias` stands in for one that it does not have."""
        parts = [*map(self.matrix, weights_of(linear.matrix()))]
        return self.joined(parts, bias if linear.bias is None else linear.bias)

    def joined(self, parts: Sequence[Matrix], bias: Tensor | None) -> LinearMapC:
        """Join matrices with one input, whose outputs stand side by side."""
        return LinearMapC(len(parts), (Matrix * 3)(*parts), self.floats(bias))

    def matrix(self, weight: Weight) -> Matrix:
        """Pack one weight."""
        panels = weight if isinstance(weight, Panels) else Panels.of(weight, self.arena)
        self.alive.append(panels)
        return _matrix_of(panels, self.floats(panels.row_scales))

    def norm(self, norm: Norm | None) -> NormWeights:
        """Pack a norm, or none."""
        if norm is None:
            return NormWeights()
        weight = 1.0 + norm.weight.float() if norm.plus_one else norm.weight
        return NormWeights(self.floats(weight), self.floats(norm.bias))

    def floats(self, values: Tensor | None) -> int | None:
        """Return the address of a copy in float32, or of the values themselves."""
        if values is None:
            return None
        held = values.float().contiguous()
        self.alive.append(held)
        return held.data_ptr()


def _rows(weights: Sequence[Weight], start: int, stop: int) -> tuple[Weight, ...]:
    """Return the given output rows of matrices that stand one after another."""
    found: list[Weight] = []
    before = 0
    for weight in weights:
        first, last = max(start - before, 0), min(stop - before, weight.shape[0])
        if first < last:
            whole = weight.whole(first, last) if isinstance(weight, Panels) else None
            found.append(whole or rows_of(weight, first, last))
        before += weight.shape[0]
    return tuple(found)


def read_rows(panels: Panels, start: int, stop: int) -> Tensor:
    """Return rows `start` to `stop` as float32 values, (rows, columns); the library has to be
    there."""
    begin, end, _ = slice(start, stop).indices(panels.rows)
    found = torch.empty(max(0, end - begin), panels.columns)
    scales = panels.row_scales
    matrix = _matrix_of(panels, None if scales is None else scales.data_ptr())
    load().es_read_rows(matrix, begin, max(begin, end), found.data_ptr())
    return found


def _matrix_of(panels: Panels, row_scales: int | None) -> Matrix:
    return Matrix(
        format=_format(panels),
        rows=panels.rows,
        columns=panels.columns,
        data=panels.data.data_ptr(),
        row_scales=row_scales,
    )


def _format(panels: Panels) -> int:
    """Return the number that `cpp/model.h` has for it."""
    if panels.format is None:
        return {torch.float32: 0, torch.float16: 5, torch.bfloat16: 6}[panels.floats]
    own = {"int8": 1, "q8_0": 2, "q4_k": 7, "q5_k": 8, "q6_k": 9, "q5_0": 10}
    return own.get(panels.format, 4 if panels.lifted else 3)
