"""Cache objects of another library as those of this one, and back.

A cache that a caller filled by calling a module is read as it lies, without a copy; when a call is
over, the same object holds what the rows held in the end. Its layers are replaced by ones of the
module's own kind, so that nothing that a window has dropped is taken for a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch.nn.functional as F

from everystep.bridge.sheets import (
    across_of_cache,
    emptied,
    is_kept,
    layers_of,
    own_layers_of,
    put_keys,
    window_of,
    without_across,
)
from everystep.cache.containers import Cache, DynamicCache, EncoderDecoderCache
from everystep.errors import RequestError
from everystep.nn.network import Store, Window

_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of layers that hold keys and values of all positions, or of the last, as they are."""
_DO = "Fill a DynamicCache(config=model.config), or leave past_key_values out"


def is_foreign(cache: object) -> bool:
    """Return whether it is a cache object, and not one of this library."""
    holds = hasattr(cache, "layers") or hasattr(cache, "self_attention_cache")
    return holds and not isinstance(cache, Cache)


def own_cache(cache: Any, stores: Sequence[Sequence[Store]]) -> Cache:
    """Return a cache of this library that holds what the other one holds, R rows as they lie in it.

    `stores`: what each layer of the module keeps of a row. Raise RequestError for kinds of caches
    whose content cannot be read, or has lost positions that the module still looks at.
    """
    kept = [store[0] for store in stores]
    if not hasattr(cache, "self_attention_cache"):
        return _read(cache, kept)
    own, across = _halves(cache)
    return EncoderDecoderCache(_read(own, kept), _read(across, None))


def _halves(cache: Any) -> tuple[Any, Any]:
    return cache.self_attention_cache, cache.cross_attention_cache


def _read(cache: Any, stores: Sequence[Store] | None) -> DynamicCache:
    """Read the layers of a cache object.

    `stores`: what each layer keeps, None for encoder states, all of which are kept.
    """
    if getattr(cache, "offloading", False):
        _refuse("waits in the memory of the host", "a cache that is not offloaded", "offloading")
    layers = list(cache.layers)
    if stores is not None and not any(map(is_kept, layers[len(stores) :])):
        layers = layers[: len(stores)]  # some modules make more than they use
    windows = [window_of(layer) for layer in layers]
    for number, layer in enumerate(layers):
        kind = type(layer).__name__
        if kind not in _GROWING:
            _refuse(
                f"has a layer of a kind that is not read: {number}", " or ".join(_GROWING), kind
            )
    length = int(cache.get_seq_length()) if layers else 0
    if not length or not any(map(is_kept, layers)):
        return DynamicCache(config=windows) if windows else DynamicCache()
    held = []
    for number, layer in enumerate(layers):
        if not is_kept(layer) or layer.keys.shape[:-1] != layer.values.shape[:-1]:
            _refuse(f"is empty in layer {number}", "all layers filled, or none", "others filled")
        store = None if stores is None or number >= len(stores) else stores[number]
        needed = min(length, store.size - 1) if isinstance(store, Window) else length
        kept = layer.keys.shape[-2]
        if kept < needed:
            what = f"has dropped positions that layer {number} still looks at"
            _refuse(what, f"the last {needed} of {length}", kept)
        before = max(0, length - kept)
        keys, values = (F.pad(one, (0, 0, before, 0)) for one in (layer.keys, layer.values))
        held.append((keys[..., -length:, :], values[..., -length:, :]))
    return DynamicCache(held, config=windows)


def foreign_cache(cache: Cache, form: Any, into: Any = None) -> Any:
    """Return a cache object of the other library that holds what ours holds.

    Its layers are like those of `form`; those of the object `into` are replaced, if there is one.
    """
    own, across = cache, None
    if isinstance(cache, EncoderDecoderCache):
        own, across = _halves(cache)
    if not own.get_seq_length():
        made = emptied(form)
    else:
        made = own_layers_of(form)
        _put(layers_of(made), own)
        if across is not None and across.get_seq_length():
            _put(across_of_cache(made), across)
        elif across is not None:
            made = without_across(made)
    if into is None:
        return made
    if across is None:
        into.layers[:] = made.layers
        return into
    for theirs, new in zip(_halves(into), _halves(made), strict=True):
        theirs.layers[:] = new.layers
    into.is_updated = made.is_updated
    return into


def _put(layers: Sequence[Any], cache: Cache) -> None:
    for layer, own in zip(layers, cache.layers, strict=True):
        keys, values = own.whole()
        size = layer.values.shape[-1]
        put_keys(layer, keys[..., : layer.keys.shape[-1]], values[..., :size], own.get_seq_length())


def _refuse(what: str, wanted: object, got: object) -> NoReturn:
    raise RequestError(f"past_key_values {what}", wanted=wanted, got=got, do=_DO)
