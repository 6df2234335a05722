"""StarCoder2: layer norms, biases everywhere and an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    decoder_family,
    heads_of,
    plain_decoder,
    window_of,
)
from everystep.models.parameters import NAMES
from everystep.models.rope_config import read_rope
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
)

_NAMES = {**NAMES, "up": "mlp.c_fc", "down": "mlp.c_proj"}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    (heads, kv_heads, size), bias = heads_of(read), read.flag("use_bias")
    layer = LayerSpec(read_rope(read, size), window_of(read))
    return plain_decoder(
        read,
        [layer] * read.count("num_hidden_layers"),
        AttentionSpec(heads, kv_heads, size, size**-0.5, bias, bias),
        eps=read.number("norm_epsilon"),
        inner=read.integer("intermediate_size"),
        mlp_bias=bias,
    )


FAMILIES = {
    "starcoder2": decoder_family(
        _read,
        _NAMES,
        vocab_size=49152,
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=30,
        num_attention_heads=24,
        num_key_value_heads=2,
        hidden_act="gelu_pytorch_tanh",
        max_position_embeddings=4096,
        norm_epsilon=1e-5,
        use_bias=True,
        tie_word_embeddings=True,
    )
}
