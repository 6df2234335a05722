"""GPT-2: learned positions, layer norms, biases everywhere and projections that lie transposed.

A checkpoint may be that of the body alone, as the head is the table of embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.reading import decoder_family, full_heads_of
from everystep.models.parameters import NAMES, Layout, decoder_parameters
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LearnedPositions,
    MlpSpec,
    NormSpec,
)
from everystep.nn.activations import ACTIVATIONS

_NAMES = {
    **NAMES,
    "embed": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "layers": "transformer.h",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    """`reorder_and_upcast_attn` changes in which order the reference computes, not what."""
    read = Fields(config)
    if read.flag("add_cross_attention", False):
        raise UnsupportedError(
            "config.json: add_cross_attention makes a decoder that looks at an encoder",
            wanted="false",
        )
    (heads, size), width = full_heads_of(read), read.integer("hidden_size")
    scale = size**-0.5 if read.flag("scale_attn_weights") else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx")
    count = read.integer("num_hidden_layers")
    activation = read.choice("activation_function", ACTIVATIONS)
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=width,
        norm=NormSpec("layer", read.number("layer_norm_epsilon"), bias=True),
        attention=AttentionSpec(heads, heads, size, scale, qkv_bias=True, out_bias=True),
        mlp=MlpSpec(read.integer("n_inner", 4 * width), activation, gated=False, bias=True),
        layers=tuple(
            LayerSpec(None, factor=1 / (i + 1) if by_layer else 1.0) for i in range(count)
        ),
        tied=read.flag("tie_word_embeddings"),
        positions=LearnedPositions(read.integer("max_position_embeddings")),
    )


_FAMILY = decoder_family(
    _read,
    _NAMES,
    vocab_size=50257,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    max_position_embeddings=1024,
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    tie_word_embeddings=True,
)
FAMILIES = {
    "gpt2": replace(
        _FAMILY,
        parameters=partial(decoder_parameters, layout=Layout(_NAMES, transposed=True)),
        leftovers=(*_FAMILY.leftovers, "*.attn.bias", "*.attn.masked_bias"),
        aliases={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
        },
    )
}
