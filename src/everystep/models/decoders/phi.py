"""Phi-1, 1.5 and 2: attention and MLP beside each other behind one norm, heads that turn in part,
and biases everywhere, in the head too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    decoder_family,
    heads_of,
    plain_decoder,
    rope_of,
)
from everystep.models.parameters import NAMES
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec, QkNorm

_NAMES = {
    **NAMES,
    "norm": "model.final_layernorm",
    "out": "self_attn.dense",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    heads, kv_heads, size = heads_of(read)
    norm: QkNorm | None = "heads" if read.flag("qk_layernorm") else None
    spec = plain_decoder(
        read,
        [LayerSpec(rope_of(read))] * read.count("num_hidden_layers"),
        AttentionSpec(heads, kv_heads, size, size**-0.5, True, True, norm),
        eps=read.number("layer_norm_eps"),
        inner=read.integer("intermediate_size"),
    )
    return replace(spec, parallel=True, pre_norms="shared", head_bias=True)


FAMILIES = {
    "phi": decoder_family(
        _read,
        _NAMES,
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        hidden_act="gelu_new",
        max_position_embeddings=2048,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_layernorm=False,
    )
}
