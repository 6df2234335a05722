"""Tuples of (keys, values) per layer, in which caches came before they were objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from everystep.cache.containers import Cache, DynamicCache, EncoderDecoderCache
from everystep.errors import RequestError


def read_legacy(given: Any, windows: Sequence[int | None], *, across: bool) -> Cache:
    """Return a cache of the tuples of every layer: (keys, values), (R, K, S, D) each.

    With `across`, those of encoder states come after them. `windows`: per layer, how far it looks
    back. Raise RequestError for anything else, and where a window is full: how many positions it
    has dropped, tuples do not say.
    """
    wanted = f"{len(windows)} layers of {4 if across else 2} tensors (rows, heads, length, size)"
    if len(given) != len(windows):
        _refuse(wanted, f"{len(given)} layers")
    for layer, window in zip(given, windows, strict=True):
        tensors = isinstance(layer, (tuple, list)) and all(isinstance(x, Tensor) for x in layer)
        if not tensors or len(layer) != (4 if across else 2) or any(x.dim() != 4 for x in layer):
            _refuse(wanted, _described(layer))
        if window is not None and layer[0].shape[2] >= window - 1:
            _refuse(
                f"fewer than {window - 1} positions in a layer with a window", layer[0].shape[2]
            )
    if across:
        return EncoderDecoderCache.from_legacy_cache(given)
    return DynamicCache(given, config=list(windows))


def _described(layer: Any) -> object:
    if not isinstance(layer, (tuple, list)):
        return type(layer).__name__
    return [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in layer]


def _refuse(wanted: str, got: object) -> NoReturn:
    do = "Pass the cache object of an earlier result"
    raise RequestError("past_key_values does not fit the model", wanted=wanted, got=got, do=do)
