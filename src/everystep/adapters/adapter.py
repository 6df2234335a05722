"""Adapters of a decoder: changes of its projections, position by position.

Each position of a step may ask for a mix: adapters by name, each with a weight, in an order. The
first one stands around the projection, and each further one around those before it. Where all of
them add, the order makes no difference; a change that turns or scales what is inside does not touch
what stands around it. Where an adapter comes from is not known here.

Beside the projections of layers an adapter may change the table of embeddings, the head, norms, and
the routers and experts of mixtures; each by its key too.

The product of a projection is computed for all positions of a step at once, as without adapters. So
a position without adapters keeps its bits, whatever its neighbours ask for.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from everystep.adapters.changes import AdapterChange, Addition, NormChange
from everystep.models.decoder import Decoder
from everystep.models.model import Model
from everystep.nn.digests import add_tensor
from everystep.nn.experts import Experts
from everystep.nn.linear import LinearMap, Matrix, dense
from everystep.nn.norm import Norm
from everystep.nn.places import places_among
from everystep.types import Extra

ROLES = ("qkv", "out", "up", "down")  # the projections of a layer that adapters change
TABLE, HEAD = "embed", "head"  # the keys of the table of embeddings and of the head
AFTER = "after."  # the keys of what is added after layers begin so
STEER = "steer:"  # and the names of steering, which no adapter of a model has
CHANGED_EMBEDDINGS = "changed embeddings"
STEERED_LAYERS = "steered layers"
_PARTS = {
    CHANGED_EMBEDDINGS: re.compile(TABLE),
    "changed heads": re.compile(HEAD),
    "changed experts": re.compile(r"layers\.\d+\.experts\..*"),
    STEERED_LAYERS: re.compile(r"after\.\d+"),
}
_NORMS = "changed norms"
EVERY_PART = frozenset({*_PARTS, _NORMS})
"""The abilities of an executor that runs an adapter whatever it changes beside projections."""

Mix = tuple[tuple[str, float], ...]
"""(name, weight) pairs of adapters, the innermost first."""

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Adapter:
    """The changes of each map by its key, as "layers.0.qkv", and of `norms` by theirs.

    Projections that read the same input are one matrix in a decoder, so one may have several. Those
    of the table all add. `adds`: whether all of them add, so that their order makes no difference.
    `needs`: the abilities that an executor must have to make them, see `EVERY_CHANGE` and
    `EVERY_PART`: what is missing is the reason that is told. `number`: one that no other adapter of
    this process has had.
    """

    targets: Mapping[str, tuple[AdapterChange, ...]]
    norms: Mapping[str, NormChange] = field(default_factory=dict)
    adds: bool = field(init=False)
    needs: frozenset[str] = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        changes = [one for each in self.targets.values() for one in each]
        object.__setattr__(self, "adds", all(isinstance(one, Addition) for one in changes))
        needs = {one.needs for one in changes if one.needs is not None}
        parts = {name for name, one in _PARTS.items() if any(map(one.fullmatch, self.targets))}
        parts |= {_NORMS} if self.norms else set()
        object.__setattr__(self, "needs", frozenset({"adapters", *needs, *parts}))
        object.__setattr__(self, "number", next(_NUMBERS))

    def digest(self) -> str:
        """Return a text that is equal for adapters that agree in every bit."""
        digest = hashlib.sha256()
        for key, changes in sorted(self.targets.items()):
            for one in changes:
                _describe(digest, key, one)
        for key, change in sorted(self.norms.items()):
            add_tensor(digest, f"{key} weight", change.weight)
            if change.bias is not None:
                add_tensor(digest, f"{key} bias", change.bias)
        return digest.hexdigest()

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        """Return the same adapter on a device, in a type."""
        return Adapter(
            {
                key: tuple(one.to(device, dtype) for one in changes)
                for key, changes in self.targets.items()
            },
            {key: one.to(device, dtype) for key, one in self.norms.items()},
        )

    @property
    def changed(self) -> set[str]:
        """The keys of all that it changes."""
        return {*self.targets, *self.norms}


def rebuilt(decoder: Decoder, keys: Iterable[str], change: Callable[[str, Any], Any]) -> Decoder:
    """Return the decoder with other maps and norms under these keys: what `change` makes of each.

    The table of embeddings stays.
    """
    inside: dict[int, list[str]] = {}
    frame: dict[str, Any] = {}
    for key in keys:
        if key.startswith("layers."):
            _, number, role = key.split(".", 2)
            inside.setdefault(int(number), []).append(role)
        elif key != TABLE:
            frame[key] = change(key, getattr(decoder, key))
    layers = list(decoder.layers)
    for index, roles in inside.items():
        layer = layers[index]
        prefix = f"layers.{index}"
        own = [role for role in roles if not role.startswith("experts.")]
        made: dict[str, Any] = {r: change(f"{prefix}.{r}", getattr(layer, r)) for r in own}
        if len(own) < len(roles) and layer.experts is not None:
            experts = (role.split(".")[1:] for role in roles if role.startswith("experts."))
            made["experts"] = _rebuilt_experts(layer.experts, experts, f"{prefix}.experts", change)
        layers[index] = replace(layer, **made)
    return replace(decoder, layers=tuple(layers), **frame)


def _rebuilt_experts(
    experts: Experts, roles: Iterable[Sequence[str]], prefix: str, change: Callable[[str, Any], Any]
) -> Experts:
    """Return the experts with others under these roles, ("up", "3") or ("router",)."""
    maps: dict[str, Any] = {}
    for role, *number in roles:
        if not number:
            maps[role] = change(f"{prefix}.{role}", getattr(experts, role))
            continue
        (one,) = number
        held = maps.setdefault(role, list(getattr(experts, role)))
        held[int(one)] = change(f"{prefix}.{role}.{one}", held[int(one)])
    made: dict[str, Any] = {r: tuple(x) if isinstance(x, list) else x for r, x in maps.items()}
    return replace(experts, **made)


def norm_with(
    base: Norm, asked: Iterable[tuple[Sequence[tuple[NormChange, float]], Tensor | None]]
) -> Norm:
    """Return the norm with changes, each list of them for its positions (n,), None for all."""
    others = []
    for changes, places in asked:
        scale, shift = base.weight, base.bias
        for one, weight in changes:
            scale = scale + one.weight * weight
            if shift is not None and one.bias is not None:
                shift = shift + one.bias * weight
        other = replace(base, weight=scale, bias=shift)
        if places is None:
            return other
        others.append((places, other))
    return replace(base, others=tuple(others))


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

    def changes_of(key: str) -> tuple[tuple[AdapterChange, float], ...]:
        return tuple((one, weight) for a, weight in adapters for one in a.targets.get(key, ()))

    def changed(key: str, base: Any) -> Any:
        if isinstance(base, Norm):
            found = [(a.norms[key], weight) for a, weight in adapters if key in a.norms]
            return norm_with(base, [(found, None)])
        changes = changes_of(key)
        return _MergedLinear(base, _merged_bias(base.bias, changes), changes)

    keys = {key for a, _ in adapters for key in a.changed}
    made = rebuilt(network, keys, changed)
    if rows := changes_of(TABLE):
        made = replace(made, table=_merged_table(dense(network.table), rows))
    if network.spec.tied and _unties(changes_of(TABLE), changes_of(HEAD)):
        made = replace(made, spec=replace(network.spec, tied=False))
    return replace(model, spec=made.spec, network=made)


def _merged_table(table: Tensor, changes: Iterable[tuple[AdapterChange, float]]) -> Tensor:
    """Return a copy of the table (V, E) with the changes in it."""
    found = table.detach().to(torch.promote_types(table.dtype, torch.float32))
    for change, weight in changes:
        found = change.in_weight(found, weight)
    return found.to(table.dtype)


def _unties(
    rows: Sequence[tuple[AdapterChange, float]], head: Sequence[tuple[AdapterChange, float]]
) -> bool:
    """Return whether a table and a head that are one matrix become two."""
    same = len(rows) == len(head) and all(a[0] is b[0] for a, b in zip(rows, head, strict=True))
    return not same


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

    def at(self, places: Tensor) -> _Nest:
        """Return the same for what reads only these (n,) of the positions."""
        return replace(self, places=places_among(self.places, places)[1])


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
        if x.dim() > 2:  # what the head reads from several layers
            return torch.stack([self(one) for one in x])
        return self._changed(self.base(x), x, None)

    def at(self, places: Tensor) -> LinearMap:
        added = []
        for change, own, weights in self.added:
            kept, here = places_among(own, places)
            added.append((change, here, weights[kept]))
        return replace(
            self, added=tuple(added), nests=tuple(nest.at(places) for nest in self.nests)
        )

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


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """Rows of the table with changes at some of the N positions, each with the positions (n,) that
    want it, None for all, and their weights, (n, 1) or one for all."""

    added: tuple[tuple[Addition, Tensor | None, Tensor | float], ...]

    def __call__(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return (N, E) what comes of rows (N, E) that were looked up for ids (N,)."""
        for one, places, weights in self.added:
            if places is None:
                rows = rows + one.rows_at(ids) * weights
            else:
                rows = rows.index_add(0, places, one.rows_at(ids[places]) * weights)
        return rows


@dataclass(frozen=True, slots=True, eq=False)
class SteeredStates:
    """Hidden states with additions after layers, by layer: each with the positions (n,) that want
    it, and their weights (n, 1)."""

    added: Mapping[int, tuple[tuple[Addition, Tensor, Tensor], ...]]

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        """Return (N, E) what comes of hidden states (N, E) after a layer."""
        for one, places, weights in self.added.get(layer, ()):
            hidden = hidden.index_add(0, places, one(hidden[places]) * weights)
        return hidden


AskedAdapters = Iterable[tuple[Uses, Tensor]]
"""Mixes of adapters, and the positions (n,) that want them."""


def adapted(decoder: Decoder, asked: AskedAdapters) -> Decoder:
    """Return the decoder for one step over N positions, some of which ask for adapters."""
    wanted = [(mix, places.to(decoder.device)) for mix, places in asked]
    sums = [one for one in wanted if all(use.adapter.adds for use in one[0])]
    nested = [one for one in wanted if not all(use.adapter.adds for use in one[0])]
    uses = _together(decoder, sums)

    def changed(key: str, base: Any) -> Any:
        if isinstance(base, Norm):
            found = (
                ([(u.adapter.norms[key], u.weight) for u in mix if key in u.adapter.norms], at)
                for mix, at in wanted
            )
            return norm_with(base, [one for one in found if one[0]])
        added = tuple(
            (change, places, weights)
            for adapter, places, weights in uses
            for change in additions_of(adapter, key)
        )
        nests = tuple(_Nest(places, parts) for mix, places in nested if (parts := _parts(key, mix)))
        return _AdaptedLinear(base, base.bias, added, nests) if added or nests else base

    every = {key for mix, _ in wanted for use in mix for key in use.adapter.changed}
    after = {key for key in every if key.startswith(AFTER)}
    made = rebuilt(decoder, every - after, changed)
    together = _together(decoder, wanted)
    rows, *steered = (
        tuple(
            (change, places, weights)
            for adapter, places, weights in together
            for change in additions_of(adapter, key)
        )
        for key in (TABLE, *sorted(after))
    )
    if steered:
        numbers = [int(key.removeprefix(AFTER)) for key in sorted(after)]
        layers = dict(zip(numbers, steered, strict=True))
        made = replace(made, changes_states=SteeredStates(layers))
    return replace(made, changes_rows=AdaptedRows(rows)) if rows else made


def additions_of(adapter: Adapter, key: str) -> list[Addition]:
    """Return the changes under a key that add, in their order."""
    return [one for one in adapter.targets.get(key, ()) if isinstance(one, Addition)]


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
