"""Mistral: a window on every layer; a null means none, and absence 4096."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    decoder_family,
    gated_decoder,
    rope_of,
    window_of,
)
from everystep.models.spec import DecoderSpec, LayerSpec


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields({"sliding_window": 4096, **config})
    layer = LayerSpec(rope_of(read), window_of(read))
    return gated_decoder(read, [layer] * read.count("num_hidden_layers"))


FAMILIES = {
    "mistral": decoder_family(
        _read,
        vocab_size=32000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
}
