"""GPT-NeoX and Pythia: heads that turn in part, and branches that stand beside each other, each
behind a norm of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, full_heads_of, plain_decoder
from everystep.models.parameters import NAMES, CheckpointLayout, decoder_parameters
from everystep.models.rope_config import read_rope
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec

_NAMES = {
    **NAMES,
    "embed": "gpt_neox.embed_in",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
    "layers": "gpt_neox.layers",
    "qkv": "attention.query_key_value",
    "out": "attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    (heads, size), bias = full_heads_of(read), read.flag("attention_bias")
    # Values beside the set of rope parameters have names of their own here, and only those count.
    base, share = read.number("rotary_emb_base"), read.number("rotary_pct")
    named = {**config, "rope_theta": base, "partial_rotary_factor": share}
    layer = LayerSpec(read_rope(Fields(named), size))
    spec = plain_decoder(
        read,
        [layer] * read.count("num_hidden_layers"),
        AttentionSpec(heads, heads, size, size**-0.5, bias, bias),
        eps=read.number("layer_norm_eps"),
        inner=read.integer("intermediate_size"),
    )
    return replace(spec, parallel=read.flag("use_parallel_residual"))


_FAMILY = decoder_family(
    _read,
    _NAMES,
    vocab_size=50432,
    hidden_size=6144,
    intermediate_size=24576,
    num_hidden_layers=44,
    num_attention_heads=64,
    hidden_act="gelu",
    max_position_embeddings=2048,
    layer_norm_eps=1e-5,
    rotary_emb_base=10_000,
    rotary_pct=0.25,
    attention_bias=True,
    use_parallel_residual=True,
)
FAMILIES = {
    "gpt_neox": replace(
        _FAMILY,
        parameters=partial(decoder_parameters, layout=CheckpointLayout(_NAMES, interleaved=True)),
        leftovers=(*_FAMILY.leftovers, "*.attention.bias", "*.attention.masked_bias"),
        prefixes=(("lm_head.", "embed_out."),),
    )
}
