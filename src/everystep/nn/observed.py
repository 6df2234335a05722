"""Linear maps that keep account of what they read: which columns of a weight matter.

The error that rounding a weight makes in its outputs is that of each column times what the column
is multiplied by; so the mean square of that is what a quantiser weighs errors with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from everystep.nn.linear import LinearMap, Matrix

Part = TypeVar("Part")


@dataclass(slots=True, eq=False)
class Squares:
    """The sum of squares of `count` inputs by column, (in,) float64."""

    total: Tensor | float = 0.0
    count: int = 0

    def add(self, x: Tensor) -> None:
        """Add (..., in) more inputs."""
        rows = x.detach().reshape(-1, x.shape[-1])
        self.total = self.total + rows.float().square().sum(0, dtype=torch.float64)
        self.count += len(rows)

    def mean(self) -> Tensor:
        """Return the mean (in,) float32, of one input or more."""
        return torch.as_tensor(self.total / self.count, dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class ObservedLinear(LinearMap):
    """The map itself, which adds what it reads to `squares`."""

    map: LinearMap
    squares: Squares = field(default_factory=Squares)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """(out,), or None."""
        return self.map.bias

    def __call__(self, x: Tensor) -> Tensor:
        self.squares.add(x)
        return self.map(x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        self.squares.add(x)
        return self.map.add_to(residual, x)

    def matrix(self) -> Matrix:
        return self.map.matrix()


def observed(part: Part) -> Part:
    """Return a part of a network, such as all of it, in which every linear map is observed."""
    if isinstance(part, LinearMap):
        return ObservedLinear(part)  # type: ignore[return-value]
    if isinstance(part, tuple):
        each = tuple(map(observed, part))
        same = all(one is other for one, other in zip(each, part, strict=True))
        return part if same else each  # type: ignore[return-value]
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner = {one.name: getattr(part, one.name) for one in fields(part) if one.init}
    made = {name: observed(value) for name, value in inner.items()}
    changed = {name: made[name] for name in inner if made[name] is not inner[name]}
    return replace(part, **changed) if changed else part


def observations(key: str, part: object) -> Iterator[tuple[str, Squares]]:
    """Yield what was read by every map of a part whose own key is `key`."""
    if isinstance(part, ObservedLinear):
        yield key, part.squares
    elif isinstance(part, tuple):
        for number, one in enumerate(part):
            yield from observations(f"{key}.{number}", one)
    elif is_dataclass(part) and not isinstance(part, type):
        for one in fields(part):
            name = f"{key}.{one.name}" if key else one.name
            yield from observations(name, getattr(part, one.name))
