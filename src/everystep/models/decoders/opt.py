"""OPT: learned positions, of which the first two rows are for none, layer norms and biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, full_heads_of, plain_decoder
from everystep.models.parameters import NAMES
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    LearnedPositions,
)

_NAMES = {
    **NAMES,
    "embed": "model.decoder.embed_tokens",
    "positions": "model.decoder.embed_positions",
    "norm": "model.decoder.final_layer_norm",
    "layers": "model.decoder.layers",
    "out": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
    "attention_norm": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm",
}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    width, bias = read.integer("hidden_size"), read.flag("enable_bias")
    _require(read, "do_layer_norm_before", True, "norms after the sums")
    _require(read, "_remove_final_layer_norm", False, "no norm after the last layer")
    _require(read, "layer_norm_elementwise_affine", True, "norms without weights")
    if read.integer("word_embed_proj_dim", width) != width:
        raise UnsupportedError(
            "config.json: embeddings of another width than the layers' are not supported",
            wanted=f"word_embed_proj_dim = hidden_size = {width}",
            got=read.values["word_embed_proj_dim"],
        )
    heads, size = full_heads_of(read)
    spec = plain_decoder(
        read,
        [LayerSpec(None)] * read.count("num_hidden_layers"),
        AttentionSpec(heads, heads, size, size**-0.5, bias, bias),
        eps=1e-5,
        inner=read.integer("ffn_dim"),
        activation="activation_function",
        mlp_bias=bias,
    )
    count = read.integer("max_position_embeddings")
    return replace(spec, positions=LearnedPositions(count, unused=2, from_mask=True))


def _require(read: Fields, key: str, wanted: bool, other: str) -> None:
    if read.flag(key) != wanted:
        raise UnsupportedError(
            f"config.json: {key} makes a model with {other}, which is not supported",
            wanted=str(wanted).lower(),
            got=str(not wanted).lower(),
        )


FAMILIES = {
    "opt": decoder_family(
        _read,
        _NAMES,
        vocab_size=50272,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        ffn_dim=3072,
        max_position_embeddings=2048,
        activation_function="relu",
        do_layer_norm_before=True,
        _remove_final_layer_norm=False,
        layer_norm_elementwise_affine=True,
        enable_bias=True,
        tie_word_embeddings=True,
    )
}
