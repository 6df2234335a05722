"""Checkpoints that hold many matrices in a stack.

The modules of transformers hold all experts of a layer in one tensor, most files each by itself.
Which stacks there are is said by the parameters; a source that has one is read as if it had the
names that parts have. Shapes are compared before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everystep.errors import FormatError
from everystep.models.loader import Kept, TensorSource
from everystep.models.parameters import Parameter, Stack
from everystep.nn.quantized import QuantizedWeight


def unstacked(
    source: TensorSource, kept: Kept | None, parameters: Iterable[Parameter]
) -> tuple[TensorSource, Kept | None]:
    """Return the source with every part under its own name, and what it keeps as it is.

    Raise FormatError where a stack does not fit its parameters.
    """
    found = set(source.names())
    stacks = {
        part.name: (part.stack, one.shape[1])
        for one in parameters
        for part in one.parts
        if part.stack is not None and part.name not in found and part.stack.name in found
    }
    if not stacks:
        return source, kept
    for stack, columns in stacks.values():
        _check(source, stack, columns)
    own = _Unstacked(source, stacks, kept)
    return own, None if kept is None else own.quantised


@dataclass
class _Unstacked:
    """`stacks`: of each name that the source has in a stack, where, and the size of a row."""

    source: TensorSource
    stacks: Mapping[str, tuple[Stack, int]]
    kept: Kept | None
    # The last stack that was read: its matrices are asked for one after another.
    _last: tuple[str, Tensor] | None = field(default=None, init=False)

    def names(self) -> Iterable[str]:
        used = {stack.name for stack, _ in self.stacks.values()}
        return [*self.stacks, *(name for name in self.source.names() if name not in used)]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.stacks:
            return self.source.shape(name)
        stack, columns = self.stacks[name]
        return stack.stop - stack.start, columns

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.stacks:
            return self.source.load(name, dtype)
        stack, columns = self.stacks[name]
        matrix = self._read(stack.name)[stack.index]
        if tuple(matrix.shape) != (stack.rows, columns):
            matrix = matrix.T
        return matrix[stack.start : stack.stop].to(dtype)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """Return what the source keeps of this name as it is."""
        return None if self.kept is None or name in self.stacks else self.kept(name)

    def _read(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = name, self.source.load(name)
        return self._last[1]


def _check(source: TensorSource, stack: Stack, columns: int) -> None:
    found, wanted = tuple(source.shape(stack.name)), (stack.count, stack.rows, columns)
    if found not in (wanted, (stack.count, columns, stack.rows)):
        what = f"the weight {stack.name!r} does not fit config.json"
        raise FormatError(what, wanted=wanted, got=found)
