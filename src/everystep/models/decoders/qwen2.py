"""Qwen2 and Qwen2.5: biases on queries, keys and values, and windows on some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.reading import (
    decoder_family,
    gated_decoder,
    heads_of,
    late_windows,
)
from everystep.models.rope_config import read_rope
from everystep.models.spec import DecoderSpec, LayerSpec


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    rope = read_rope(read, heads_of(read)[2])
    layers = [LayerSpec(rope, window) for window in late_windows(read)]
    return gated_decoder(read, layers, qkv_bias=True)


FAMILIES = {
    "qwen2": decoder_family(
        _read,
        vocab_size=151936,
        intermediate_size=22016,
        num_key_value_heads=32,
        max_position_embeddings=32768,
        use_sliding_window=False,
        sliding_window=4096,
        max_window_layers=28,
    )
}
