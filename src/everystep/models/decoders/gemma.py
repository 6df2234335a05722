"""Gemma 2 and the text models of Gemma 3: norms before and after each branch, scaled embeddings.

Gemma 2 caps scores and logits, Gemma 3 normalises queries and keys instead; layers with a window
have a rope of their own there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    FULL,
    SLIDING,
    decoder_family,
    gated_decoder,
    heads_of,
    layer_types,
    rope_of,
)
from everystep.models.parameters import NAMES
from everystep.models.rope_config import read_rope
from everystep.models.spec import DecoderSpec, LayerSpec, QkNorm
from everystep.nn.rotary import UNSCALED, Rope

_NAMES = {
    **NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GLOBAL, _LOCAL = 1_000_000.0, 10_000.0  # the bases of Gemma 3's ropes


def _gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Gemma 2, where every other layer has a window, from the first one on.

    A null means no cap.
    """
    read = Fields({"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, **config})
    rope = rope_of(read)
    return _gemma(read, {FULL: rope, SLIDING: rope}, every=2, qk_norm=None)


def _gemma3(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Gemma 3, where every sixth layer has no window."""
    read = Fields(config)
    if read.has("attn_logit_softcapping"):
        raise UnsupportedError(
            "config.json: attn_logit_softcapping has no effect in Gemma 3",
            wanted="null",
            got=read.values["attn_logit_softcapping"],
            do="Remove it: transformers reads it and does not apply it",
        )
    (_, _, size), every = heads_of(read), read.integer("sliding_window_pattern", 6)
    ropes = {kind: _rope_of_type(read, size, kind) for kind in (FULL, SLIDING)}
    return _gemma(read, ropes, every=every, qk_norm="heads")


def _gemma(
    read: Fields, ropes: Mapping[str, Rope], *, every: int, qk_norm: QkNorm | None
) -> DecoderSpec:
    if read.flag("use_bidirectional_attention", False):
        raise UnsupportedError(
            "config.json: use_bidirectional_attention makes a model that does not generate",
            wanted="false",
        )
    bias, layers = read.flag("attention_bias", False), _layers(read, every, ropes)
    spec = gated_decoder(
        read,
        layers,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=qk_norm,
        activation="hidden_activation",
    )
    scale, softcap = read.number("query_pre_attn_scalar") ** -0.5, _cap(read, "attn_logit")
    return replace(
        spec,
        norm=replace(spec.norm, plus_one=True),
        attention=replace(spec.attention, scale=scale, softcap=softcap),
        post_norms=True,
        embed_scale=spec.width**0.5,
        final_softcap=_cap(read, "final_logit"),
    )


def _layers(read: Fields, every: int, ropes: Mapping[str, Rope]) -> Sequence[LayerSpec]:
    """Return the layers; by default each has a window but for every n-th."""
    count = read.count("num_hidden_layers")
    usual = [SLIDING if (index + 1) % every else FULL for index in range(count)]
    window = read.integer("sliding_window")
    kinds = layer_types(read, usual)
    return [LayerSpec(ropes[kind], window if kind == SLIDING else None) for kind in kinds]


def _cap(read: Fields, what: str) -> float | None:
    key = f"{what}_softcapping"
    return read.number(key) if read.has(key) else None


def _rope_of_type(read: Fields, size: int, kind: str) -> Rope:
    """Return the rope of layers of a type, which has a set of its own in `rope_parameters`.

    In older files what is there is that of layers without a window, and `rope_local_base_freq` the
    base of the others.
    """
    sets = read.values.get("rope_parameters")
    if isinstance(sets, Mapping) and kind in sets:
        return read_rope(read, size, kind, _GLOBAL if kind == FULL else _LOCAL)
    if kind == FULL:
        return read_rope(read, size, theta=_GLOBAL)
    return Rope(size, read.number("rope_local_base_freq", _LOCAL), UNSCALED)


_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILIES = {
    "gemma2": decoder_family(
        _gemma2, _NAMES, **_DEFAULTS, vocab_size=256000, max_position_embeddings=8192
    ),
    "gemma3_text": decoder_family(
        _gemma3, _NAMES, **_DEFAULTS, vocab_size=262208, max_position_embeddings=131072
    ),
}
