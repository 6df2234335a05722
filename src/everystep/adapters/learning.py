"""Adapters in a forward that gradients pass through, from the logits to their tensors.

Nothing is written in place. Weights of the model below that are packed or quantised stay frozen,
but a gradient passes through their products to what they read, and so to the adapters before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.adapters.adapter import (
    ROLES,
    TABLE,
    AdaptedRows,
    Adapter,
    Mix,
    additions_of,
    norm_with,
    rebuilt,
)
from everystep.adapters.changes import AdapterChange, Delta, Magnitude
from everystep.adapters.peft_adapter import PeftAdapter
from everystep.models.decoder import Decoder
from everystep.nn.linear import LinearMap, Matrix, dense_rows, weights_of
from everystep.nn.norm import Norm
from everystep.nn.places import places_among

_STRETCH_VALUES = 1 << 22  # of a quantised weight that are values at a time, on the way back


# --- through what is frozen -----------------------------------------------------------------------


class _FrozenProduct(torch.autograd.Function):
    """The product of a frozen map, whose gradient is that of the product with its weight.

    Where activations are rounded before they meet codes, the rounding counts as none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, base: LinearMap) -> Tensor:
        ctx.base = base
        found = base(x)
        # Queries and keys are turned in place, and torch forbids that of a view that is made here.
        memory, start = found.untyped_storage(), found.storage_offset()
        return found.new_empty(0).set_(memory, start, found.size(), found.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _back(grads[0], ctx.base.matrix()), None


def _back(grad: Tensor, matrix: Matrix) -> Tensor:
    """Turn a gradient (..., out) of a product into that of what was read, (..., in)."""
    rows, begin = grad.flatten(0, -2), 0
    weights = weights_of(matrix)
    found = rows.new_zeros(len(rows), weights[0].shape[1])
    for weight in weights:
        count, columns = weight.shape
        step = count if isinstance(weight, Tensor) else max(1, _STRETCH_VALUES // columns)
        for start in range(0, count, step):
            stop = min(start + step, count)
            values = dense_rows(weight, start, stop).to(grad.dtype)
            own = rows[:, begin + start : begin + stop]
            found.addmm_(own, values)
        begin += count
    return found.view(*grad.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Frozen(LinearMap):
    """A map whose weights do not learn, that a gradient passes through nevertheless."""

    base: LinearMap
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        found: Tensor = _FrozenProduct.apply(x, self.base)  # type: ignore[no-untyped-call]
        return found

    def matrix(self) -> Matrix:
        return self.base.matrix()


# --- what learns ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A change with its weight, and the share of what it reads that it leaves out."""

    change: AdapterChange
    weight: float
    dropout: float

    def around(
        self, y: Tensor, x: Tensor, bias: Tensor | None, plain: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Turn what the inside gives (n, rows) of `x` (n, in) into what comes of it; `plain`: maps
        (n, in) to (n, rows) without changes."""
        if not self.dropout or not isinstance(self.change, Delta | Magnitude):
            return self.change.after(y, x, bias, self.weight)
        read = F.dropout(x, self.dropout)
        if isinstance(self.change, Delta):
            return self.change.after(y, read, bias, self.weight)
        # The lengths of a DoRA change what the map makes of what is left, as in PEFT.
        found = plain(read)
        return y + (self.change.after(found, read, bias, self.weight) - found)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The steps that change rows [start, stop) of a map, the innermost first."""

    start: int
    stop: int
    steps: tuple[_Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _LearningLinear(LinearMap):
    """A map with changes for some of the N positions that it reads, differentiable in all.

    `asked`: positions (n,), None for all of them, with the parts that they want.
    """

    base: LinearMap
    bias: Tensor | None
    asked: tuple[tuple[Tensor | None, tuple[_Part, ...]], ...]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        for places, parts in self.asked:
            if places is None:
                y = self._changed(y, x, parts)
            else:
                y = y.index_copy(0, places, self._changed(y[places], x[places], parts))
        return y

    def at(self, places: Tensor) -> LinearMap:
        asked = tuple(
            (None if own is None else places_among(own, places)[1], parts)
            for own, parts in self.asked
        )
        return replace(self, asked=asked)

    def matrix(self) -> Matrix:
        """Return the weight of the map, without changes."""
        return self.base.matrix()

    def _changed(self, y: Tensor, x: Tensor, parts: tuple[_Part, ...]) -> Tensor:
        # Parts lie side by side, perhaps with rows between them that nobody changes.
        ends = [0, *(end for part in parts for end in (part.start, part.stop)), y.shape[1]]
        sizes = [stop - start for start, stop in pairwise(ends)]
        pieces = list(torch.split(y, sizes, dim=1))
        for number, part in enumerate(parts):
            pieces[2 * number + 1] = self._around(part, pieces[2 * number + 1], x)
        filled = [one for one in pieces if one.shape[1]]
        return filled[0] if len(filled) == 1 else torch.cat(filled, dim=1)

    def _around(self, part: _Part, y: Tensor, x: Tensor) -> Tensor:
        """Return (n, rows) of a part, after all of its steps; `y`: the same without any."""
        own = slice(part.start, part.stop)
        read = [x]
        for step in reversed(part.steps):
            read.append(step.change.before(read[-1], step.weight))
        found = y if read[-1] is x else self.base(read[-1])[:, own]
        bias = None if self.bias is None else self.bias[own]
        for step, given in zip(part.steps, reversed(read[:-1]), strict=True):
            found = step.around(found, given, bias, lambda x: self.base(x)[:, own])
        return found


def learning(
    decoder: Decoder,
    adapters: Mapping[str, PeftAdapter],
    asked: Sequence[tuple[Mix, Tensor | None]],
    *,
    frozen: bool,
) -> Decoder:
    """Return the decoder for one forward over N positions, differentiable in the adapters.

    `asked`: mixes, each with the positions (n,) that want it, None for all. `frozen`: gradients
    pass through the decoder's maps, and none to their weights.
    """
    used = {name for mix, _ in asked for name, _ in mix}
    live = {name: adapters[name].live() for name in used}
    dropout = {name: adapters[name].dropout for name in used}
    through = frozen and torch.is_grad_enabled() and any(adapters[name].learns for name in used)

    def changed(key: str, base: Any) -> Any:
        if isinstance(base, Norm):
            found = (
                ([(live[n].norms[key], w) for n, w in mix if key in live[n].norms], at)
                for mix, at in placed
            )
            return norm_with(base, [one for one in found if one[0]])
        wanted = tuple(
            (at, parts) for mix, at in placed if (parts := _parts(key, live, dropout, mix))
        )
        return _LearningLinear(base, base.bias, wanted) if wanted else base

    placed = [(mix, None if at is None else at.to(decoder.device)) for mix, at in asked]
    base = _passed(decoder) if through else decoder
    made = rebuilt(base, {key for one in live.values() for key in one.changed}, changed)
    rows = tuple(
        (change, at, weight)
        for mix, at in placed
        for name, weight in mix
        for change in additions_of(live[name], TABLE)
    )
    return replace(made, changes_rows=AdaptedRows(rows)) if rows else made


def _passed(decoder: Decoder) -> Decoder:
    """Return the decoder with maps that a gradient passes through, and none to their weights."""

    def passed(base: Any) -> Any:
        return _Frozen(base, base.bias) if isinstance(base, LinearMap) else base

    layers = []
    for layer in decoder.layers:
        maps: dict[str, Any] = {role: passed(getattr(layer, role)) for role in ROLES}
        if layer.experts is not None:
            experts = layer.experts
            maps["experts"] = replace(
                experts,
                router=passed(experts.router),
                up=tuple(map(passed, experts.up)),
                down=tuple(map(passed, experts.down)),
            )
        layers.append(replace(layer, **maps))
    return replace(decoder, layers=tuple(layers), head=passed(decoder.head))


def _parts(
    key: str, live: Mapping[str, Adapter], dropout: Mapping[str, float], mix: Mix
) -> tuple[_Part, ...]:
    """Return the changes that a mix makes of one projection, by the rows that they change."""
    found: dict[tuple[int, int], list[_Step]] = {}
    for name, weight in mix:
        for change in live[name].targets.get(key, ()):
            rows = change.start, change.start + change.rows
            found.setdefault(rows, []).append(_Step(change, weight, dropout[name]))
    return tuple(_Part(*rows, tuple(steps)) for rows, steps in sorted(found.items()))
