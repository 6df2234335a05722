"""Steering: vectors that are added to hidden states after layers, for the requests that ask for it.

To a request it is the outermost adapter of its mix, so rows, caches, schedulers and kernels treat
it as one: it is read once for all rows of a step, and no row is shared with other steering. Its
name is made of its values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from everystep.adapters.adapter import AFTER, STEER, Adapter, SteeredStates
from everystep.adapters.changes import AdapterChange, Addition, AfterLayer
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.files.safetensors import read_file
from everystep.models import Model
from everystep.models.decoder import Decoder
from everystep.types.given_tensors import require_tensor

_KNOWN: WeakValueDictionary[str, Adapter] = WeakValueDictionary()
"""Steering by its name: of equal values there is one, so rows of equal steering are shared."""


@dataclass(frozen=True, slots=True)
class SteeringAdapter:
    """The steering of a row: the adapter that it is, and its name in a mix."""

    name: str
    adapter: Adapter


def read_steering(model: object, value: object) -> SteeringAdapter | None:
    """Return the steering of vectors by layer, {12: vector}; None for none.

    RequestError for what are no vectors of the model's width after layers that it has, and
    UnsupportedError for a model that is no decoder of this library.
    """
    if value is None:
        return None
    network = model.network if isinstance(model, Model) else None
    if not isinstance(network, Decoder):
        kind = "a wrapped model" if network is None else type(network).__name__
        raise UnsupportedError(
            "steer adds to the layers of a decoder of this library",
            got=kind,
            do="Load a decoder with everystep.load, or change the embeddings by a hook",
        )
    if not isinstance(value, Mapping) or not value:
        raise RequestError("steer says no layers", wanted="{layer: vector}", got=shown(value))
    count, width = len(network.layers), network.spec.width
    dtype = torch.promote_types(network.dtype, torch.float32)
    targets: dict[str, tuple[AdapterChange, ...]] = {}
    for layer in sorted(value, key=str):
        if type(layer) is not int or not 0 <= layer < count:
            what = "steer names a layer that the model does not have"
            raise RequestError(what, wanted=f"0 to {count - 1}", got=shown(layer))
        name, form = f"steer[{layer}]", f"a ({width},) tensor of finite numbers"
        vector = require_tensor(value[layer], name, form, dims=(1,), holds="floats")
        own = vector.detach().to(network.device, dtype, copy=True)
        if len(own) != width or not bool(torch.isfinite(own).all()):
            got = f"({len(own)},)" if len(own) != width else f"one that is not finite in {dtype}"
            raise RequestError(f"{name} does not fit the model", wanted=form, got=got)
        targets[f"{AFTER}{layer}"] = (AfterLayer(own),)
    made = Adapter(targets)
    where = "" if network.device.type == "cpu" else f" on {network.device}"
    name = f"{STEER}{made.digest()[:32]}{where}"
    return SteeringAdapter(name, _KNOWN.setdefault(name, made))


def steered_size(model: object) -> tuple[int, int]:
    """Return after how many layers a model can be steered, and the size of its hidden states; two
    zeros for a model that cannot."""
    network = model.network if isinstance(model, Model) else None
    if not isinstance(network, Decoder):
        return 0, 0
    return len(network.layers), network.spec.width


def read_vectors(file: Path) -> dict[int, Tensor]:
    """Return the vectors of a safetensors file, by the layers that they are named by.

    RequestError for a name that is no number of a layer.
    """
    weights, _ = read_file(file)
    for name in weights.names():
        if not re.fullmatch(r"\d{1,6}", name):
            wanted = "the numbers of layers, as 12"
            raise RequestError(f"{file} holds no vectors by layer", wanted=wanted, got=name[:40])
    return {int(name): weights.load(name) for name in weights.names()}


def read_steering_of_rows(
    model: object, value: object, rows: int
) -> Sequence[SteeringAdapter | None]:
    """Return (rows,) the steering of each row: of one value for all, or of a list with one each."""
    if not isinstance(value, list | tuple):
        return [read_steering(model, value)] * rows
    if len(value) != rows:
        wanted = f"vectors by layer, or {rows} of them"
        raise RequestError(
            "steer does not fit the call", wanted=wanted, got=f"{len(value)} of them"
        )
    return [read_steering(model, one) for one in value]


def steered(decoder: Decoder, each: Sequence[SteeringAdapter | None], length: int) -> Decoder:
    """Return the decoder for a forward over rows of `length` positions, each with its steering."""
    places: dict[str, list[int]] = {}
    for row, one in enumerate(each):
        if one is not None:
            places.setdefault(one.name, []).extend(range(row * length, (row + 1) * length))
    adapters = {one.name: one.adapter for one in each if one is not None}
    added: dict[int, list[tuple[Addition, Tensor, Tensor]]] = {}
    for name, own in places.items():
        at = torch.tensor(own, device=decoder.device)
        for key, changes in adapters[name].targets.items():
            layer = int(key.removeprefix(AFTER))
            weights = torch.ones(len(own), 1, device=decoder.device, dtype=decoder.dtype)
            after = [(change, at, weights) for change in changes if isinstance(change, AfterLayer)]
            added.setdefault(layer, []).extend(after)
    states = SteeredStates({layer: tuple(own) for layer, own in added.items()})
    return replace(decoder, changes_states=states) if added else decoder


def vectors_of(adapter: Adapter) -> dict[int, Tensor]:
    """Return the vectors (E,) that an adapter adds after layers, by layer."""
    return {
        int(key.removeprefix(AFTER)): one.vector
        for key, changes in adapter.targets.items()
        for one in changes
        if isinstance(one, AfterLayer)
    }


def without_steering(mix: tuple[tuple[str, float], ...]) -> tuple[str, ...]:
    """Return the names of adapters of a mix that a model knows."""
    return tuple(name for name, _ in mix if not name.startswith(STEER))
