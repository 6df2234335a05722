"""LoRA (Hu et al. 2021): a low-rank product that is added to projections, position by position.

The base product is computed for all positions of a step at once, as without adapters; then each
adapter adds its own to the positions that ask for it. So a position without adapters keeps its
bits, whatever its neighbours ask for. Where an adapter comes from is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everystep.models.decoder import Decoder
from everystep.models.model import Model
from everystep.nn.digests import add_tensor
from everystep.nn.linear import LinearMap, Matrix, dense

_ROLES = ("qkv", "out", "up", "down")  # the projections of a layer that adapters change


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """An addition to some rows of a map: `scale` * x A^T B^T, from row `start` on.

    `a`: (rank, in). `b`: (rows, rank).
    """

    a: Tensor
    b: Tensor
    scale: float
    start: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        """Map (..., in) -> (..., rows)."""
        return (x @ self.a.T) @ self.b.T * self.scale


@dataclass(frozen=True, slots=True, eq=False)
class LoRA:
    """An adapter: the key of each projection that it changes, as "layers.0.qkv", and the deltas.

    Projections that read the same input are one matrix in a decoder, so one may have several.
    """

    targets: Mapping[str, tuple[Delta, ...]]

    def digest(self) -> str:
        """Return a text that is equal for adapters that agree in every bit."""
        digest = hashlib.sha256()
        for key, deltas in sorted(self.targets.items()):
            for one in deltas:
                add_tensor(digest, f"{key} {one.start} {float(one.scale).hex()} a", one.a)
                add_tensor(digest, "b", one.b)
        return digest.hexdigest()

    def to(self, device: torch.device, dtype: torch.dtype) -> LoRA:
        """Return the same adapter on a device, in a type."""
        return LoRA(
            {
                key: tuple(
                    replace(one, a=one.a.to(device, dtype), b=one.b.to(device, dtype))
                    for one in deltas
                )
                for key, deltas in self.targets.items()
            }
        )


@dataclass(frozen=True, slots=True, eq=False)
class _MergedLinear(LinearMap):
    """A map as a weight alone, float values with the deltas added, made when it is asked for."""

    base: LinearMap
    bias: Tensor | None
    deltas: tuple[tuple[Delta, float], ...]

    def matrix(self) -> Tensor:
        """Return (out, in), a copy."""
        found = dense(self.base.matrix()).detach().clone()
        wide = torch.promote_types(found.dtype, torch.float32)
        for delta, weight in self.deltas:
            rows = found[delta.start : delta.start + len(delta.b)]
            change = delta.b.to(wide) @ delta.a.to(wide) * (delta.scale * weight)
            rows.copy_(rows.to(wide) + change)
        return found


def merged(model: Model, adapters: Sequence[tuple[LoRA, float]]) -> Model:
    """Return the model with adapters in its weights, each times a number; only to be exported.

    Its maps compute nothing. A model that is no decoder takes no adapters.
    """
    network = model.network
    if not isinstance(network, Decoder):
        return model

    def changed(key: str, base: LinearMap) -> LinearMap:
        deltas = [(one, weight) for lora, weight in adapters for one in lora.targets.get(key, ())]
        return _MergedLinear(base, base.bias, tuple(deltas)) if deltas else base

    layers = []
    for index, layer in enumerate(network.layers):
        maps: dict[str, Any] = {
            role: changed(f"layers.{index}.{role}", getattr(layer, role)) for role in _ROLES
        }
        layers.append(replace(layer, **maps))
    return replace(model, network=replace(network, layers=tuple(layers)))


_Use = tuple[LoRA, Tensor, Tensor]
"""An adapter in a step: the positions (n,) that want it, and with which weights (n, 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class _AdaptedLinear(LinearMap):
    """A map, whatever its storage, with deltas for some of the N positions that it reads.

    `deltas`: each with the positions (n,) that want it, and their weights (n, 1).
    """

    base: LinearMap
    bias: Tensor | None
    deltas: tuple[tuple[Delta, Tensor, Tensor], ...]

    def __call__(self, x: Tensor) -> Tensor:
        return self._changed(self.base(x), x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._changed(self.base.add_to(residual, x), x)

    def matrix(self) -> Matrix:
        """Return the weight of the map, without deltas."""
        return self.base.matrix()

    def _changed(self, y: Tensor, x: Tensor) -> Tensor:
        for delta, places, weights in self.deltas:
            rows = y[:, delta.start : delta.start + len(delta.b)]
            rows.index_add_(0, places, delta(x[places]) * weights)
        return y


AskedAdapters = Iterable[tuple[tuple[tuple[str, float], ...], Tensor]]
"""(name, weight) pairs of known adapters, and the positions (n,) that want all of them."""


def adapted(decoder: Decoder, adapters: Mapping[str, LoRA], asked: AskedAdapters) -> Decoder:
    """Return the decoder for one step over N positions, some of which ask for adapters."""
    uses = _uses(decoder, adapters, asked)
    layers = []
    for index, layer in enumerate(decoder.layers):
        changed: dict[str, Any] = {}
        for role in _ROLES:
            key, base = f"layers.{index}.{role}", getattr(layer, role)
            deltas = [
                (delta, places, weights)
                for adapter, places, weights in uses
                for delta in adapter.targets.get(key, ())
            ]
            if deltas:
                changed[role] = _AdaptedLinear(base, base.bias, tuple(deltas))
        layers.append(replace(layer, **changed))
    return replace(decoder, layers=tuple(layers))


def _uses(decoder: Decoder, adapters: Mapping[str, LoRA], asked: AskedAdapters) -> list[_Use]:
    """Return each adapter once, with all positions that ask for it."""
    found: dict[str, list[tuple[Tensor, float]]] = {}
    for pairs, places in asked:
        for name, weight in pairs:
            found.setdefault(name, []).append((places, weight))
    uses = []
    for name, wanted in found.items():
        places = torch.cat([at for at, _ in wanted])
        each = [torch.full((len(at), 1), weight, dtype=torch.float64) for at, weight in wanted]
        weights = torch.cat(each).to(decoder.device, decoder.dtype)
        uses.append((adapters[name], places.to(decoder.device), weights))
    return uses
