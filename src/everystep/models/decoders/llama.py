"""Llama 2 and 3, SmolLM2 and everything else that says `model_type: llama`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, gated_decoder, rope_of
from everystep.models.spec import DecoderSpec, LayerSpec


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    layer = LayerSpec(rope_of(read))
    bias, mlp_bias = read.flag("attention_bias", False), read.flag("mlp_bias", False)
    layers = [layer] * read.count("num_hidden_layers")
    return gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)


FAMILIES = {
    "llama": decoder_family(
        _read, vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048
    )
}
