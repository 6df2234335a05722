"""Steering: vectors that are added to hidden states after layers, for the requests that ask for it.

To a request it is the outermost adapter of its mix, so rows, caches, schedulers and kernels treat
it as one: it is read once for all rows of a step, and no row is shared with other steering. Its
name is made of its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from everystep.adapters.adapter import AFTER, STEER, Adapter
from everystep.adapters.changes import AdapterChange, AfterLayer
from everystep.errors import RequestError, UnsupportedError, shown
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
        if len(vector) != width or not bool(torch.isfinite(vector).all()):
            got = f"({len(vector)},)" if len(vector) != width else "a value that is not finite"
            raise RequestError(f"{name} does not fit the model", wanted=form, got=got)
        own = vector.detach().to(network.device, dtype, copy=True)
        targets[f"{AFTER}{layer}"] = (AfterLayer(own),)
    made = Adapter(targets)
    where = "" if network.device.type == "cpu" else f" on {network.device}"
    name = f"{STEER}{made.digest()[:32]}{where}"
    return SteeringAdapter(name, _KNOWN.setdefault(name, made))


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
