"""Which cache object a call fills: the one that was passed, or a new one of the kind it names.

`cache_implementation` names the kind, `cache_config` says how numbers are quantised, and
`max_cache_len` is the least room of a static cache. What a kind cannot do is refused here, by the
names of these fields. How a cache is read into rows and filled from them is not known here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from everystep.api.call import Call, Host
from everystep.api.past import is_recurrent, require_abilities
from everystep.api.prompts import Source
from everystep.cache.choices import read_quantization, refuse_quantized_windows
from everystep.cache.containers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
)
from everystep.cache.formats import Quantization
from everystep.cache.layers import QuantizedLayer
from everystep.config import Effective
from everystep.config.fields import OLD_CACHES
from everystep.errors import UnsupportedError, message

_ABSENT = {
    "offloaded": "Use 'dynamic', or 'quantized' to save memory",
    "offloaded_static": "Use 'static', or 'quantized' to save memory",
    "offloaded_hybrid": "Use 'static', or 'quantized' to save memory",
    "offloaded_hybrid_chunked": "Use 'static', or 'quantized' to save memory",
    "paged": "Call everystep.generate(model, tokenizer, prompts), whose rows share their memory",
}
"""Kinds that are not built -> what to do."""


def with_cache(call: Call, model: Host, source: Source, passed: Cache | None) -> Call:
    """The call with the cache that it fills: `passed`, a new one if one is returned, or none."""
    if passed is not None:
        layer = passed.layers[0] if passed.layers else None
        how = layer.quantization if isinstance(layer, QuantizedLayer) else None
        return replace(call, past=passed, quantization=how)
    if call.effective.use_cache is False:
        return call
    chosen = _new_cache(call, model, source)
    if chosen is None:
        return call
    require_abilities(call, chosen, f"cache_implementation={_kind(call.effective)!r}")
    kept = chosen if call.effective.return_dict_in_generate else None
    return replace(call, past=kept, quantization=row_quantization(call.effective, model))


def loop_cache(call: Call, model: Host, source: Source) -> Cache | None:
    """The cache that a decoding loop of the caller's fills; None for one that goes without."""
    if call.past is not None or call.effective.use_cache is False:
        return call.past
    return _new_cache(call, model, source)


def row_quantization(effective: Effective, model: Host) -> Quantization | None:
    """How rows keep what they hold, None for full precision."""
    if _kind(effective) != "quantized":
        return None
    if model.is_encoder_decoder:
        what = "a quantised cache is for models without an encoder"
        _refuse(what, "cache_implementation='quantized'", "Use 'dynamic' or 'static'")
    refuse_quantized_windows(model.windows)
    return read_quantization(effective.cache_config or {})


def refuse_choice(effective: Effective) -> None:
    """Raises if the caller chose a cache for calls that return texts or events, and no cache."""
    if _kind(effective) == "quantized":
        return
    for name in ("cache_implementation", "cache_config", "max_cache_len"):
        value = effective[name]
        if name in effective.caller and value is not None and value != "dynamic":
            _refuse(
                f"{name} chooses the cache that model.generate returns; here none is returned",
                f"{name}={value!r}",
                f"Leave {name} out, or call model.generate",
            )


def _kind(effective: Effective) -> str:
    """ "dynamic", "static" or "quantized"; UnsupportedError for what the caller cannot have."""
    kind = effective.cache_implementation
    # As in the reference, which once had a static cache of this name for what grows with a window.
    if kind in (None, "hybrid"):
        return "dynamic"
    if kind not in _ABSENT:
        return "static" if kind in OLD_CACHES else str(kind)
    if effective.source("cache_implementation") != "checkpoint":
        what = "cache_implementation asks for a cache that this version does not have"
        _refuse(what, repr(kind), _ABSENT[kind])
    # The tokens are the same, and the caller did not ask.
    return "dynamic"


def _new_cache(call: Call, model: Host, source: Source) -> Cache | None:
    """An empty cache of the kind that the configuration names; None if no object holds states."""
    kind, windows = _kind(call.effective), list(model.windows)
    if is_recurrent(model):
        if kind != "dynamic":
            what = "rows of a model with recurrent layers hold states, not keys and values"
            _refuse(what, f"cache_implementation={kind!r}", "Leave cache_implementation out")
        return None
    how = row_quantization(call.effective, model)
    if how is not None:
        return QuantizedCache("everystep", windows, how.bits, None, None, how.group, how.residual)
    if kind == "dynamic":
        own, across = DynamicCache(config=windows), DynamicCache()
        return EncoderDecoderCache(own, across) if model.is_encoder_decoder else own
    room = max(call.positions, call.effective.max_cache_len or 0)
    static = StaticCache(windows, room)
    if not model.is_encoder_decoder:
        return static
    read = max(int(places[-1]) + 1 for places in source.places)
    return EncoderDecoderCache(static, StaticCache([None] * len(windows), read))


def _refuse(what: str, got: str, do: str) -> NoReturn:
    raise UnsupportedError(message(what, got=got, do=do))
