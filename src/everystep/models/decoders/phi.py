"""Phi-1, 1.5 and 2: attention and MLP beside each other behind one norm, heads that turn in part,
and biases everywhere, in the head too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.reading import decoder_family, heads_of, rope_of
from everystep.models.parameters import NAMES
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, QkNorm
from everystep.nn.activations import ACTIVATIONS

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
    inner, activation = read.integer("intermediate_size"), read.choice("hidden_act", ACTIVATIONS)
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("hidden_size"),
        norm=NormSpec("layer", read.number("layer_norm_eps"), bias=True),
        attention=AttentionSpec(heads, kv_heads, size, size**-0.5, True, True, norm),
        mlp=MlpSpec(inner, activation, gated=False, bias=True),
        layers=(LayerSpec(rope_of(read)),) * read.integer("num_hidden_layers"),
        parallel=True,
        pre_norms="shared",
        tied=read.flag("tie_word_embeddings"),
        head_bias=True,
    )


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
