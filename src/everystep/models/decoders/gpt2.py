"""GPT-2 and GPTBigCode (StarCoder 1, SantaCoder): learned positions, layer norms and biases.

GPT-2's projections lie transposed, and its checkpoints may be those of the body alone, as the head
is the table of embeddings. In GPTBigCode all queries share one key, or none do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, full_heads_of, plain_decoder
from everystep.models.families import Family
from everystep.models.parameters import NAMES, CheckpointLayout, decoder_parameters
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LearnedPositions,
)

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


def _gpt2(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a GPT-2.

    `reorder_and_upcast_attn` changes in which order transformers computes, not what.
    """
    read = Fields(config)
    spec = _read(read)
    if read.flag("scale_attn_by_inverse_layer_idx"):
        weaker = (LayerSpec(None, factor=1 / number) for number in range(1, len(spec.layers) + 1))
        return replace(spec, layers=tuple(weaker))
    return spec


def _big_code(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    spec = _read(read)
    kv_heads = 1 if read.flag("multi_query") else spec.attention.heads
    return replace(spec, attention=replace(spec.attention, kv_heads=kv_heads))


def _read(read: Fields) -> DecoderSpec:
    if read.flag("add_cross_attention", False):
        raise UnsupportedError(
            "config.json: add_cross_attention makes a decoder that looks at an encoder",
            wanted="false",
        )
    (heads, size), width = full_heads_of(read), read.integer("hidden_size")
    scale = size**-0.5 if read.flag("scale_attn_weights") else 1.0
    spec = plain_decoder(
        read,
        [LayerSpec(None)] * read.count("num_hidden_layers"),
        AttentionSpec(heads, heads, size, scale, qkv_bias=True, out_bias=True),
        eps=read.number("layer_norm_epsilon"),
        inner=read.integer("n_inner", 4 * width),
        activation="activation_function",
    )
    return replace(spec, positions=LearnedPositions(read.integer("max_position_embeddings")))


def _family(
    read_spec: Callable[[Mapping[str, Any]], DecoderSpec], layout: CheckpointLayout, **defaults: Any
) -> Family:
    found = decoder_family(
        read_spec,
        layout.names,
        vocab_size=50257,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=1024,
        layer_norm_epsilon=1e-5,
        scale_attn_weights=True,
        tie_word_embeddings=True,
        **defaults,
    )
    return replace(
        found,
        parameters=partial(decoder_parameters, layout=layout),
        leftovers=(*found.leftovers, "*.attn.bias", "*.attn.masked_bias"),
        aliases={
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "n_positions": "max_position_embeddings",
        },
    )


FAMILIES = {
    "gpt2": _family(
        _gpt2,
        CheckpointLayout(_NAMES, transposed=True),
        activation_function="gelu_new",
        scale_attn_by_inverse_layer_idx=False,
    ),
    "gpt_bigcode": _family(
        _big_code,
        CheckpointLayout(_NAMES, interleaved=True),
        activation_function="gelu_pytorch_tanh",
        multi_query=True,
    ),
}
