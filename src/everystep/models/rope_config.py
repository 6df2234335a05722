"""From a configuration to ropes: the newer `rope_parameters` and the older `rope_scaling`.

The newer form may hold one set per type of layer. Values beside the set (`rope_theta`,
`partial_rotary_factor`, `original_max_position_embeddings`) fill what the set leaves open; the last
one wins over the set, as in transformers. What transformers leaves aside, and real files hold, is a
warning that names it; an unknown kind, or any other key, is an error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.nn.rotary import (
    Dynamic,
    Interpolated,
    Llama3,
    LongRope,
    Rope,
    Scaling,
    Yarn,
    yarn_attention_factor,
)

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_rope(
    outer: Fields, head_dim: int, layer_type: str | None = None, theta: float = 10_000.0
) -> Rope:
    """Read the rope of the layers of `layer_type`; `theta` is the family's default base."""
    values = _parameters(outer, layer_type)
    inner = Fields(values, "config.json, rope parameters")
    base = inner.number("rope_theta", outer.number("rope_theta", theta))
    share = inner.number("partial_rotary_factor", outer.number("partial_rotary_factor", 1.0))
    if share > 1:
        raise inner.wrong("partial_rotary_factor", "at most 1", share)
    kind = inner.choice("rope_type", _KINDS, inner.text("type", "default"))
    _check_keys(values, kind)
    if kind == "proportional":
        return Rope(head_dim, base, Interpolated(inner.number("factor", 1.0), share))
    dim = int(head_dim * share)
    if dim < 2 or dim % 2:
        raise outer.wrong("head_dim", "an even number of rotated values per head", dim)
    return Rope(dim, base, _KINDS[kind][0](outer, inner, dim))


def _parameters(outer: Fields, layer_type: str | None) -> dict[str, Any]:
    value = outer.values.get("rope_parameters") or outer.values.get("rope_scaling") or {}
    if not isinstance(value, Mapping):
        raise outer.wrong("rope_parameters", "an object", value)
    nested = value.get(layer_type) if layer_type is not None else None
    chosen = value if nested is None else nested
    if not isinstance(chosen, Mapping) or any(isinstance(v, Mapping) for v in chosen.values()):
        raise outer.wrong("rope_parameters", f"one set of values for {layer_type} layers", value)
    return dict(chosen)


def _check_keys(values: Mapping[str, Any], kind: str) -> None:
    known = _COMMON | _KINDS[kind][1]
    left = {key for key, value in values.items() if value is not None} - known
    what = f"config.json: the rope parameters of type {kind!r} have keys it does not know"
    if unknown := left - _ELSEWHERE:
        raise UnsupportedError(
            what,
            wanted=", ".join(sorted(known)),
            got=", ".join(sorted(unknown)),
            do="Remove them",
        )
    if left:
        names = ", ".join(sorted(left))
        warnings.warn(f"{what}, which change nothing, as in transformers: {names}", stacklevel=2)


def _unscaled(outer: Fields, inner: Fields, dim: int) -> Scaling:
    return Interpolated()


def _linear(outer: Fields, inner: Fields, dim: int) -> Scaling:
    return Interpolated(inner.number("factor"))


def _dynamic(outer: Fields, inner: Fields, dim: int) -> Scaling:
    if dim == 2:
        raise outer.wrong("head_dim", "more than 2 rotated values for dynamic scaling", dim)
    return Dynamic(inner.number("factor"), outer.integer("max_position_embeddings"))


def _trained(outer: Fields, inner: Fields) -> int:
    found = outer if outer.has(_TRAINED) else inner
    return found.integer(_TRAINED, outer.integer("max_position_embeddings"))


def _stretch(outer: Fields, inner: Fields, trained: int) -> float:
    return inner.number("factor", outer.integer("max_position_embeddings") / trained)


def _yarn(outer: Fields, inner: Fields, dim: int) -> Scaling:
    trained = _trained(outer, inner)
    factor = _stretch(outer, inner, trained)
    mscale = inner.number("mscale") if inner.has("mscale") else None
    all_dim = inner.number("mscale_all_dim") if inner.has("mscale_all_dim") else None
    turns = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    for key, value in zip(("beta_fast", "beta_slow"), turns, strict=True):
        if not 1e-9 <= value <= 1e9:
            raise inner.wrong(key, "1e-9 to 1e9 turns", value)
    return Yarn(
        factor,
        trained,
        inner.number("attention_factor", yarn_attention_factor(factor, mscale, all_dim)),
        *turns,
        inner.flag("truncate", True),
    )


def _longrope(outer: Fields, inner: Fields, dim: int) -> Scaling:
    trained = _trained(outer, inner)
    factor = _stretch(outer, inner, trained)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return LongRope(
        inner.numbers("short_factor", dim // 2),
        inner.numbers("long_factor", dim // 2),
        trained,
        inner.number("attention_factor", default),
    )


def _llama3(outer: Fields, inner: Fields, dim: int) -> Scaling:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.wrong("low_freq_factor", f"less than high_freq_factor = {high}", low)
    return Llama3(inner.number("factor"), low, high, _trained(outer, inner))


_TRAINED = "original_max_position_embeddings"
_Reader = Callable[[Fields, Fields, int], Scaling]
_KINDS: Mapping[str, tuple[_Reader, set[str]]] = {
    "default": (_unscaled, set()),
    "linear": (_linear, {"factor"}),
    "dynamic": (_dynamic, {"factor"}),
    "yarn": (
        _yarn,
        {"factor", _TRAINED, "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"},
    ),
    "longrope": (
        _longrope,
        {"factor", _TRAINED, "attention_factor", "short_factor", "long_factor"},
    ),
    "llama3": (_llama3, {"factor", _TRAINED, "low_freq_factor", "high_freq_factor"}),
    "proportional": (_unscaled, {"factor"}),
}
_ELSEWHERE = {key for _, keys in _KINDS.values() for key in keys} | {
    "attn_factor",
    "finetuned",
    "alpha",
    "extrapolation_factor",
}
"""Keys that other kinds or other programs know, which real files hold without effect."""
