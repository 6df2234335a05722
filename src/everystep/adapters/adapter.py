"""Adapters of a decoder: changes of its projections, position by position.

Each position of a step may ask for a mix: adapters by name, each with a weight, in an order. The
first one stands around the projection, and each further one around those before it. Where all of
them add, the order makes no difference; a change that turns or scales what is inside does not touch
what stands around it. Where an adapter comes from is not known here.

The product of a projection is computed for all positions of a step at once, as without adapters. So
a position without adapters keeps its bits, whatever its neighbours ask for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from everystep.adapters.changes import AdapterChange, Addition
from everystep.models.decoder import Decoder
from everystep.models.model import Model
from everystep.nn.digests import add_tensor
from everystep.nn.linear import LinearMap, Matrix, dense
from everystep.types import Extra

ROLES = ("qkv", "out", "up", "down")  # the projections of a layer that adapters change

Mix = tuple[tuple[str, float], ...]
"""(name, weight) pairs of adapters, the innermost first."""

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """The changes of each projection by its key, as "layers.0.qkv".

    Projections that read the same input are one matrix in a decoder, so one may have several.
    `adds`: whether all of them add, so that their order makes no difference. `needs`: the abilities
    that an executor must have to make them; `number`: one that no other adapter of this process has
    had.
    """

    targets: Mapping[str, tuple[AdapterChange, ...]]
    adds: bool = field(init=False)
    needs: frozenset[str] = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        changes = [one for each in self.targets.values() for one in each]
        object.__setattr__(self, "adds", all(isinstance(one, Addition) for one in changes))
        needs = {one.needs for one in changes if one.needs is not None}
        object.__setattr__(self, "needs", frozenset({"adapters", *needs}))
        object.__setattr__(self, "number", next(_NUMBERS))

    def digest(self) -> str:
        """Return a text that is equal for adapters that agree in every bit."""
        digest = hashlib.sha256()
        for key, changes in sorted(self.targets.items()):
            for one in changes:
                _describe(digest, key, one)
        return digest.hexdigest()

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return the same adapter on a device, in a type."""
        return Adapter(
            {
                key: tuple(one.to(device, dtype) for one in changes)
                for key, changes in self.targets.items()
            }
        )


def _describe(digest: Any, key: str, change: AdapterChange) -> None:
    name = f"{key} {type(change).__name__} {change.start}"
    digest.update(name.encode())
    own: Any = change
    for one in fields(own):
        value = getattr(change, one.name)
        if isinstance(value, Tensor):
            add_tensor(digest, f"{name} {one.name}", value)
        elif isinstance(value, AdapterChange):
            _describe(digest, f"{name} {one.name}", value)
        else:
            told = float(value).hex() if isinstance(value, float) else str(value)
            digest.update(f" {one.name}={told}".encode())


# --- in the weights -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _MergedLinear(LinearMap):
    """A map as a weight and a bias alone, float values with changes in them.

    The weight is made when it is asked for. `changes`: with their weights, the innermost first.
    """

    base: LinearMap
    bias: Tensor | None
    changes: tuple[tuple[AdapterChange, float], ...]

    def matrix(self) -> Tensor:
        """Return (out, in), a copy."""
        found = dense(self.base.matrix()).detach().clone()
        wide = torch.promote_types(found.dtype, torch.float32)
        for change, weight in self.changes:
            own = slice(change.start, change.start + change.rows)
            found[own] = change.in_weight(found[own].to(wide), weight).to(found.dtype)
        return found


def _merged_bias(
    base: Tensor | None, changes: Iterable[tuple[AdapterChange, float]]
) -> Tensor | None:
    """Return a copy of the bias (out,) of a map with the changes in it, None for none."""
    found = None if base is None else base.detach().clone()
    for change, weight in changes:
        own = slice(change.start, change.start + change.rows)
        changed = change.in_bias(None if found is None else found[own], weight)
        if found is not None and changed is not None:
            found[own] = changed
    return found


def merged(model: Model, adapters: Sequence[tuple[Adapter, float]]) -> Model:
    """Return the model with a mix of adapters in its weights; only to be exported.

    Its maps compute nothing. A model that is no decoder takes no adapters. Raise UnsupportedError
    for a bias where the model has none.
    """
    network = model.network
    if not isinstance(network, Decoder):
        return model

    def changed(key: str, base: LinearMap) -> LinearMap:
        changes = tuple((one, weight) for a, weight in adapters for one in a.targets.get(key, ()))
        return _MergedLinear(base, _merged_bias(base.bias, changes), changes) if changes else base

    layers = []
    for index, layer in enumerate(network.layers):
        maps: dict[str, Any] = {
            role: changed(f"layers.{index}.{role}", getattr(layer, role)) for role in ROLES
        }
        layers.append(replace(layer, **maps))
    return replace(model, network=replace(network, layers=tuple(layers)))


# --- in a step ------------------------------------------------------------------------------------


class AdapterUse(NamedTuple):
    """An adapter in a mix, with its name and weight there."""

    name: str
    weight: float
    adapter: Adapter


Uses = tuple[AdapterUse, ...]
"""A mix whose names are resolved, the innermost adapter first."""


def uses_of(extra: Extra) -> Uses:
    """Return what a feed asks for."""
    pairs = zip(extra.adapters, cast(tuple[Adapter, ...], extra.resolved), strict=True)
    return tuple(AdapterUse(name, weight, adapter) for (name, weight), adapter in pairs)


def ordered(uses: Uses) -> Uses:
    """Return the uses in the order in which they are computed: by name where all of them add, so
    that it does not matter in which order they were named."""
    adds = all(one.adapter.adds for one in uses)
    return tuple(sorted(uses, key=_place)) if adds else uses


def _place(use: AdapterUse) -> tuple[str, int, float]:
    return use.name, use.adapter.number, use.weight


_Together = tuple[Adapter, Tensor, Tensor]
"""An adapter in a step: the positions (n,) that want it, and with which weights (n, 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Nest:
    """Changes that stand around each other at positions (n,), the innermost first.

    `parts`: the changes, with their weights, of each stretch of rows of a map.
    """

    places: Tensor
    parts: tuple[tuple[tuple[AdapterChange, float], ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLinear(LinearMap):
    """A map, whatever its storage, with changes for some of the N positions that it reads.

    `added`: each with the positions (n,) that want it, and their weights (n, 1). `nests`: what
    other positions want.
    """

    base: LinearMap
    bias: Tensor | None
    added: tuple[tuple[Addition, Tensor, Tensor], ...]
    nests: tuple[_Nest, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return self._changed(self.base(x), x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._changed(self.base.add_to(residual, x), x, residual)

    def matrix(self) -> Matrix:
        """Return the weight of the map, without changes."""
        return self.base.matrix()

    def _changed(self, y: Tensor, x: Tensor, residual: Tensor | None) -> Tensor:
        for one, places, weights in self.added:
            rows = y[:, one.start : one.start + one.rows]
            rows.index_add_(0, places, one(x[places]) * weights)
        for nest in self.nests:
            given = x[nest.places]
            plain = cache(partial(self.base, given))  # which only parts that turn nothing need
            for part in nest.parts:
                own = slice(part[0][0].start, part[0][0].start + part[0][0].rows)
                found = self._around(part, given, plain, own)
                if residual is not None:
                    found = residual[nest.places, own] + found
                y[nest.places, own] = found
        return y

    def _around(
        self,
        part: tuple[tuple[AdapterChange, float], ...],
        x: Tensor,
        plain: Callable[[], Tensor],
        own: slice,
    ) -> Tensor:
        """Return (n, rows) of the rows `own`, after all changes; `plain`: gives (n, out) without
        any."""
        read = [x]
        for change, weight in reversed(part):
            read.append(change.before(read[-1], weight))
        y = (plain() if read[-1] is x else self.base(read[-1]))[:, own]
        bias = None if self.bias is None else self.bias[own]
        for (change, weight), given in zip(part, reversed(read[:-1]), strict=True):
            y = change.after(y, given, bias, weight)
        return y


AskedAdapters = Iterable[tuple[Uses, Tensor]]
"""Mixes of adapters, and the positions (n,) that want them."""


def adapted(decoder: Decoder, asked: AskedAdapters) -> Decoder:
    """Return the decoder for one step over N positions, some of which ask for adapters."""
    sums: list[tuple[Uses, Tensor]] = []
    nested: list[tuple[Uses, Tensor]] = []
    for mix, places in asked:
        adds = all(one.adapter.adds for one in mix)
        (sums if adds else nested).append((mix, places.to(decoder.device)))
    uses = _together(decoder, sums)
    layers = []
    for index, layer in enumerate(decoder.layers):
        changed: dict[str, Any] = {}
        for role in ROLES:
            key, base = f"layers.{index}.{role}", getattr(layer, role)
            added = tuple(
                (change, places, weights)
                for adapter, places, weights in uses
                for change in adapter.targets.get(key, ())
                if isinstance(change, Addition)
            )
            nests = tuple(
                _Nest(places, parts) for mix, places in nested if (parts := _parts(key, mix))
            )
            if added or nests:
                changed[role] = _AdaptedLinear(base, base.bias, added, nests)
        layers.append(replace(layer, **changed))
    return replace(decoder, layers=tuple(layers))


def _parts(key: str, mix: Uses) -> tuple[tuple[tuple[AdapterChange, float], ...], ...]:
    """Return the changes that a mix makes of one projection, by the rows that they change."""
    found: dict[int, list[tuple[AdapterChange, float]]] = {}
    for use in mix:
        for change in use.adapter.targets.get(key, ()):
            found.setdefault(change.start, []).append((change, use.weight))
    return tuple(map(tuple, found.values()))


def _together(decoder: Decoder, asked: AskedAdapters) -> list[_Together]:
    """Return each adapter once, with all positions that ask for it, by name: so the order in which
    a position's sum is taken does not depend on its neighbours."""
    found: dict[tuple[str, int], list[tuple[Tensor, AdapterUse]]] = {}
    for mix, places in asked:
        for use in mix:
            found.setdefault((use.name, use.adapter.number), []).append((places, use))
    uses = []
    for _, wanted in sorted(found.items(), key=lambda one: one[0]):
        places = torch.cat([at for at, _ in wanted])
        each = [torch.full((len(at), 1), use.weight, dtype=torch.float64) for at, use in wanted]
        weights = torch.cat(each).to(decoder.device, decoder.dtype)
        uses.append((wanted[0][1].adapter, places, weights))
    return uses
