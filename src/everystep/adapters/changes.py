"""What an adapter does to some rows of one linear map, one class for each way of doing it.

A change stands around what is inside it: the map, or the map with other changes. It may turn what
the inside reads, and change what the inside gives. Its weight says how much of the difference it
makes: 0 leaves the inside as it is, 1 is the change as it was trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor

from everystep.errors import UnsupportedError


class AdapterChange(ABC):
    """A change of rows [start, start + rows) of a map; a frozen dataclass.

    `needs`: the ability that an executor must have to make it, where not all that know adapters do.
    """

    __slots__ = ()
    start: int
    needs: ClassVar[str | None] = None

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows that it changes."""

    def before(self, x: Tensor, weight: float) -> Tensor:
        """Turn what it reads (n, in) into what the inside reads."""
        return x

    @abstractmethod
    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        """Turn what the inside gives (n, rows) into what it gives; `x`: (n, in) what it has read,
        `bias`: (rows,) of the map."""

    @abstractmethod
    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        """Turn the weight (rows, in) of what is inside into that of a map that gives the same."""

    def in_bias(self, bias: Tensor | None, weight: float) -> Tensor | None:
        """Turn the bias (rows,) of what is inside, None where it has none, likewise."""
        return bias

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the same change on a device, in a type."""
        own: Any = self
        found: dict[str, Tensor | AdapterChange] = {}
        for one in fields(own):
            value = getattr(self, one.name)
            if isinstance(value, AdapterChange):
                found[one.name] = value.to(device, dtype)
            elif isinstance(value, Tensor):
                counts = not value.is_floating_point()
                found[one.name] = value.to(device, value.dtype if counts else dtype)
        return cast(Self, replace(own, **found))


# --- what is added --------------------------------------------------------------------------------


class Addition(AdapterChange):
    """A change that adds a function of what is read, whatever is inside."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., in) -> (..., rows)."""

    @abstractmethod
    def product(self, dtype: torch.dtype) -> Tensor:
        """Return (rows, in), the weight of what is added."""

    def rows_at(self, ids: Tensor) -> Tensor:
        """Return (n, in): these (n,) rows of the weight of what is added, as a table is read."""
        raise NotImplementedError

    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        return y + self(x) * weight

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        return matrix + self.product(matrix.dtype) * weight


@dataclass(frozen=True, slots=True, eq=False)
class Delta(Addition):
    """`scale` * (x A^T B^T + shift). `a`: (rank, in); `b`: (rows, rank); `shift`: (rows,) or None.

    LoRA (Hu et al. 2021), and what can be written so: AdaLoRA, VeRA.
    """

    a: Tensor
    b: Tensor
    scale: float
    start: int = 0
    shift: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.b)

    def __call__(self, x: Tensor) -> Tensor:
        y = (x @ self.a.T) @ self.b.T
        return (y if self.shift is None else y + self.shift) * self.scale

    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        scale = self.scale * weight
        if scale != 0 and x.dim() == 2 and self.shift is None:
            # The small factor is scaled, and the product is added where it is made.
            return torch.addmm(y, (x @ self.a.T) * scale, self.b.T)
        return Addition.after(self, y, x, bias, weight)

    def product(self, dtype: torch.dtype) -> Tensor:
        return self.b.to(dtype) @ self.a.to(dtype) * self.scale

    def rows_at(self, ids: Tensor) -> Tensor:
        return (self.b[ids] @ self.a) * self.scale

    def in_bias(self, bias: Tensor | None, weight: float) -> Tensor | None:
        return _shifted(bias, self.shift, self.scale * weight)


def _shifted(bias: Tensor | None, shift: Tensor | None, share: float) -> Tensor | None:
    """Return a bias with so much of a shift added."""
    if shift is None:
        return bias
    if bias is None:
        raise UnsupportedError(
            "an adapter adds a bias to a projection that has none",
            wanted="an adapter without lora_bias, to be merged into the weights",
            got=f"a bias of {len(shift)} values",
            do="Name it in each call instead of merging it",
        )
    return bias + shift.to(bias.dtype) * share


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Addition):
    """x W^T; `matrix`: (rows, in). LoHa (Hyeon-Woo et al. 2021), SHiRA (Bhardwaj et al. 2024)."""

    matrix: Tensor
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.matrix)

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T

    def product(self, dtype: torch.dtype) -> Tensor:
        return self.matrix.to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Kronecker(Addition):
    """x (L ⊗ R)^T, never made as a whole; `left`: (a, c), `right`: (b, d), rows = a b, in = c d.

    LoKr (Yeh et al. 2023).
    """

    needs: ClassVar[str | None] = "Kronecker products"
    left: Tensor
    right: Tensor
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.left) * len(self.right)

    def __call__(self, x: Tensor) -> Tensor:
        folded = x.reshape(*x.shape[:-1], self.left.shape[1], self.right.shape[1])  # (..., c, d)
        return (self.left @ (folded @ self.right.T)).flatten(-2)  # (..., a, b)

    def product(self, dtype: torch.dtype) -> Tensor:
        return torch.kron(self.left.to(dtype), self.right.to(dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Shift(Addition):
    """`vector` (rows,) more of the bias, whatever is read: a bias that was trained.

    `width`: the size of what is read.
    """

    vector: Tensor
    width: int
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.vector)

    def __call__(self, x: Tensor) -> Tensor:
        return self.vector.expand(*x.shape[:-1], self.rows)

    def product(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.rows, self.width, dtype=dtype, device=self.vector.device)

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        return matrix

    def in_bias(self, bias: Tensor | None, weight: float) -> Tensor | None:
        return _shifted(bias, self.vector, weight)


# --- whole modules and rows ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Replacement(Addition):
    """A difference that makes another weight of one: `difference` (rows, in), and `shift` (rows,)
    of the bias, None where there is none.

    A module that was trained as a whole, as a difference from that of the model.
    """

    needs: ClassVar[str | None] = "whole modules"
    difference: Tensor
    start: int = 0
    shift: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.difference)

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.difference.T
        return y if self.shift is None else y + self.shift

    def product(self, dtype: torch.dtype) -> Tensor:
        return self.difference.to(dtype)

    def rows_at(self, ids: Tensor) -> Tensor:
        return self.difference[ids]

    def in_bias(self, bias: Tensor | None, weight: float) -> Tensor | None:
        return _shifted(bias, self.shift, weight)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows(Addition):
    """Differences that make others of some of the `height` rows: `differences` (n, in) of the rows
    `tokens` (n,), each of which stands there once.
    """

    differences: Tensor
    tokens: Tensor
    height: int
    start: int = 0

    @property
    def rows(self) -> int:
        return self.height

    def __call__(self, x: Tensor) -> Tensor:
        found = x @ self.differences.T
        wide = found.new_zeros(*found.shape[:-1], self.height)
        return wide.index_copy(-1, self.tokens, found)

    def product(self, dtype: torch.dtype) -> Tensor:
        own = self.differences.to(dtype)
        return own.new_zeros(self.height, own.shape[1]).index_copy(0, self.tokens, own)

    def rows_at(self, ids: Tensor) -> Tensor:
        return (ids[:, None] == self.tokens).to(self.differences.dtype) @ self.differences


@dataclass(frozen=True, slots=True, eq=False)
class AfterLayer(Addition):
    """A vector (E,) that is added to what comes out of a layer, whatever the layer reads."""

    vector: Tensor
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.vector)

    def __call__(self, x: Tensor) -> Tensor:
        return self.vector.to(x.dtype).expand_as(x)

    def product(self, dtype: torch.dtype) -> Tensor:
        raise UnsupportedError(
            "steering is no weight", do="Name it in each call: steer={layer: vector}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class NormChange:
    """A difference that makes another norm of one: (E,) of its weight and of its bias, None where
    it has none."""

    weight: Tensor
    bias: Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> NormChange:
        """Return the same change on a device, in a type."""
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return NormChange(self.weight.to(device, dtype), bias)


# --- what turns or scales -------------------------------------------------------------------------


class InputChange(AdapterChange):
    """A change of what is read alone; `height`: the number of rows that read it."""

    __slots__ = ()
    height: int

    @property
    def rows(self) -> int:
        return self.height

    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Rotation(InputChange):
    """A rotation of what the inside reads: x R, block by block; `turns`: (blocks, n, n).

    OFT (Qiu et al. 2023).
    """

    needs: ClassVar[str | None] = "rotations"
    turns: Tensor
    height: int
    start: int = 0

    def before(self, x: Tensor, weight: float) -> Tensor:
        folded = x.reshape(*x.shape[:-1], *self.turns.shape[:2])
        turned = torch.einsum("...bk,bkc->...bc", folded, self.turns).flatten(-2)
        return x + (turned - x) * weight if weight != 1 else turned

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        one = torch.eye(self.turns.shape[1], dtype=matrix.dtype, device=matrix.device)
        turns = one + (self.turns.to(matrix.dtype) - one) * weight
        folded = matrix.reshape(-1, *self.turns.shape[:2])
        return torch.einsum("rbc,bkc->rbk", folded, turns).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class InputScaling(InputChange):
    """A scale of what the inside reads, `factors` (in,): IA3 (Liu et al. 2022) of some maps."""

    needs: ClassVar[str | None] = "scaled inputs"
    factors: Tensor
    height: int
    start: int = 0

    def before(self, x: Tensor, weight: float) -> Tensor:
        return x * _share(self.factors, weight)

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        return matrix * _share(self.factors.to(matrix.dtype), weight)


@dataclass(frozen=True, slots=True, eq=False)
class OutputScaling(AdapterChange):
    """A scale of what the inside gives, the bias too, `factors` (rows,): IA3 of other maps."""

    factors: Tensor
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.factors)

    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        return y * _share(self.factors, weight)

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        return matrix * _share(self.factors.to(matrix.dtype), weight)[:, None]

    def in_bias(self, bias: Tensor | None, weight: float) -> Tensor | None:
        return None if bias is None else bias * _share(self.factors.to(bias.dtype), weight)


def _share(factors: Tensor, weight: float) -> Tensor:
    """Return the factors of so much of a scale: 1 for none of it."""
    return 1 + (factors - 1) * weight


@dataclass(frozen=True, slots=True, eq=False)
class Magnitude(AdapterChange):
    """Each row of the inside with the delta added gets another length, and the bias stays.

    `gains`: (rows,) the wanted lengths as shares of those that the rows of the map have with the
    delta. DoRA (Liu et al. 2024).
    """

    delta: Delta
    gains: Tensor
    start: int = 0

    @property
    def rows(self) -> int:
        return len(self.gains)

    def after(self, y: Tensor, x: Tensor, bias: Tensor | None, weight: float) -> Tensor:
        straight = y if bias is None else y - bias
        return y + ((self.gains - 1) * straight + self.gains * self.delta(x)) * weight

    def in_weight(self, matrix: Tensor, weight: float) -> Tensor:
        gains = self.gains.to(matrix.dtype)[:, None]
        more = (gains - 1) * matrix + gains * self.delta.product(matrix.dtype)
        return matrix + more * weight


EVERY_CHANGE = frozenset(
    one.needs for one in (Kronecker, Rotation, InputScaling, Replacement) if one.needs is not None
)
"""The abilities of an executor that makes changes of every class."""
