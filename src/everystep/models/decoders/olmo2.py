"""OLMo 2: norms only behind each branch, and queries and keys normalised over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, gated_decoder, rope_of
from everystep.models.parameters import NAMES
from everystep.models.spec import DecoderSpec, LayerSpec

_NAMES = {
    **NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    bias, count = read.flag("attention_bias"), read.count("num_hidden_layers")
    spec = gated_decoder(
        read, [LayerSpec(rope_of(read))] * count, qkv_bias=bias, out_bias=bias, qk_norm="whole"
    )
    return replace(spec, pre_norms="none", post_norms=True)


FAMILIES = {
    "olmo2": decoder_family(
        _read,
        _NAMES,
        vocab_size=50304,
        intermediate_size=11008,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        attention_bias=False,
    )
}
