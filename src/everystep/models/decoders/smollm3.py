"""SmolLM3: every fourth layer knows no positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    FULL,
    SLIDING,
    decoder_family,
    gated_decoder,
    layer_types,
    rope_of,
)
from everystep.models.spec import DecoderSpec, LayerSpec


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a SmolLM3.

    Windows are on layers without positions, unless `layer_types` says otherwise.
    """
    read = Fields(config)
    rope, turning = rope_of(read, theta=2_000_000.0), _turning(read)
    windowed = read.flag("use_sliding_window") and read.has("sliding_window")
    kinds = layer_types(read, [SLIDING if windowed and not one else FULL for one in turning])
    layers = [
        LayerSpec(
            rope if one else None, read.integer("sliding_window") if kind == SLIDING else None
        )
        for one, kind in zip(turning, kinds, strict=True)
    ]
    bias, mlp_bias = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    return gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


def _turning(read: Fields) -> list[bool]:
    """Return which layers turn queries and keys: those with a 1 in the `no_rope_layers`."""
    count = read.count("num_hidden_layers")
    if not read.has("no_rope_layers"):
        every = read.integer("no_rope_layer_interval", 4)
        return [(index + 1) % every != 0 for index in range(count)]
    given = read.values["no_rope_layers"]
    if not isinstance(given, list) or len(given) < count or {*map(repr, given)} - {"0", "1"}:
        raise read.wrong("no_rope_layers", f"a 0 or 1 for each of {count} layers", given)
    return [bool(one) for one in given[:count]]


FAMILIES = {
    "smollm3": decoder_family(
        _read,
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        use_sliding_window=False,
        tie_word_embeddings=True,
    )
}
