"""What a row holds in a cache object of another library, outside of it, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from everystep.bridge.sheets import (
    Place,
    across_of_cache,
    layers_of,
    own_layers_of,
    put_keys,
    without_across,
)
from everystep.types import Past


def past_of_row(place: Place) -> Past:
    """Return keys and values of a row as copies, and those of its encoder states."""
    sheet = place.on
    source, across = place.source, across_of_cache(sheet.cache)
    read = 0 if place.states is None else len(place.states)
    layers: list[tuple[Tensor, ...]] = []
    for number, layer in enumerate(layers_of(sheet.cache)):
        end = layer.keys.shape[-2] - source.cut
        own = slice(max(0, end - place.length), end)
        held = [one[place.index, :, own] for one in (layer.keys, layer.values)]
        if across:
            crossed = across[number]
            held += [one[place.index, :, :read] for one in (crossed.keys, crossed.values)]
        layers.append(tuple(one.clone() for one in held))
    return Past(place.length, tuple(layers))


def cache_of(past: Past, form: Any, device: torch.device) -> Any:
    """Return a cache object of one row like `form`, which holds the past."""
    made = own_layers_of(form)
    across = across_of_cache(made)
    for number, (layer, held) in enumerate(zip(layers_of(made), past.layers, strict=True)):
        parts = [one[None].to(device) for one in held]
        put_keys(layer, parts[0], parts[1], past.length)
        if len(parts) > 2:
            put_keys(across[number], parts[2], parts[3], parts[2].shape[2])
    known = all(len(held) > 2 for held in past.layers)
    return without_across(made) if across and not known else made
