"""Checkpoints that hold the parts of parameters under other names, or many matrices in a stack.

The modules of the reference hold all experts of a layer in one tensor, most files each by itself.
Which forms there are is said by the parameters; a source that has another one is read as if it had
the names that parts have. Shapes are compared before anything is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from everystep.errors import FormatError
from everystep.models.loader import Kept, TensorSource
from everystep.models.parameters import Alias, Parameter
from everystep.nn.quantized import QuantizedWeight


def under_own_names(
    source: TensorSource, kept: Kept | None, parameters: Iterable[Parameter]
) -> tuple[TensorSource, Kept | None]:
    """The source with every part under its own name, and what it keeps as it is.

    FormatError where a stack does not fit its parameters.
    """
    found = set(source.names())
    aliases = {
        part.name: (part.alias, one.shape[1:])
        for one in parameters
        for part in one.parts
        if part.alias is not None and part.name not in found and part.alias.name in found
    }
    if not aliases:
        return source, kept
    for alias, columns in aliases.values():
        _check_stack(source, alias, *columns)
    own = _OwnNames(source, aliases, kept)
    return own, None if kept is None else own.quantised


@dataclass
class _OwnNames:
    """`aliases`: of each name that the source has elsewhere, where, and the size of a row."""

    source: TensorSource
    aliases: Mapping[str, tuple[Alias, tuple[int, ...]]]
    kept: Kept | None
    # The last stack that was read: its matrices are asked for one after another.
    _stack: tuple[str, Tensor] | None = field(default=None, init=False)

    def names(self) -> Iterable[str]:
        used = {alias.name for alias, _ in self.aliases.values()}
        return [*self.aliases, *(name for name in self.source.names() if name not in used)]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.aliases:
            return self.source.shape(name)
        alias, row = self.aliases[name]
        return (alias.stop - alias.start, *row) if alias.count else self.source.shape(alias.name)

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        if name not in self.aliases:
            return self.source.load(name, dtype)
        alias, row = self.aliases[name]
        if not alias.count:
            return self.source.load(alias.name, dtype)[alias.start : alias.stop]
        matrix = self._read(alias.name)[alias.index]
        if tuple(matrix.shape) != (alias.rows, *row):
            matrix = matrix.T
        return matrix[alias.start : alias.stop].to(dtype)

    def quantised(self, name: str) -> QuantizedWeight | None:
        """What the source keeps of this name as it is."""
        return None if self.kept is None or name in self.aliases else self.kept(name)

    def _read(self, name: str) -> Tensor:
        if self._stack is None or self._stack[0] != name:
            self._stack = None
            self._stack = name, self.source.load(name)
        return self._stack[1]


def _check_stack(source: TensorSource, alias: Alias, columns: int) -> None:
    if not alias.count:
        return
    found, wanted = tuple(source.shape(alias.name)), (alias.count, alias.rows, columns)
    if found not in (wanted, (alias.count, columns, alias.rows)):
        what = f"the weight {alias.name!r} does not fit config.json"
        raise FormatError(what, wanted=wanted, got=found)
