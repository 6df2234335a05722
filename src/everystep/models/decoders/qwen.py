"""Qwen2 and Qwen2.5, with biases on queries, keys and values, and Qwen3, which normalises queries
and keys per head instead, and whose heads have a size of their own."""

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
from everystep.nn.rotary import Rope


def _qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    return gated_decoder(read, windowed_layers(read, rope_of(read)), qkv_bias=True)


def _qwen3(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    bias = read.flag("attention_bias", False)
    layers = windowed_layers(read, rope_of(read))
    return gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, qk_norm="heads")


def windowed_layers(read: Fields, rope: Rope) -> list[LayerSpec]:
    """Return the layers, with windows where `use_sliding_window` turns them on.

    Those in `layer_types` have one then, or those from `max_window_layers` on. transformers keeps
    no window at all when the switch is off, whatever the types say.
    """
    count = read.count("num_hidden_layers")
    windowed = read.flag("use_sliding_window")
    first = read.integer("max_window_layers", least=0) if windowed else count
    kinds = layer_types(read, [SLIDING if index >= first else FULL for index in range(count)])
    window = read.integer("sliding_window") if windowed and SLIDING in kinds else None
    return [LayerSpec(rope, window if kind == SLIDING else None) for kind in kinds]


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "qwen2": decoder_family(_qwen2, **_DEFAULTS),
    "qwen3": decoder_family(_qwen3, **_DEFAULTS, head_dim=128),
}
