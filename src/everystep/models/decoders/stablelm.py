"""StableLM: layer norms before a gated MLP, and heads that turn in part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, gated_decoder, rope_of
from everystep.models.spec import DecoderSpec, LayerSpec, NormSpec


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    # Heads have no size of their own here.
    read = Fields({**config, "head_dim": None})
    if read.flag("qk_layernorm"):
        raise UnsupportedError(
            "config.json: qk_layernorm gives each head a norm of its own, which is not supported",
            wanted="false",
            got="true",
        )
    layers = [LayerSpec(rope_of(read))] * read.count("num_hidden_layers")
    parallel = read.flag("use_parallel_residual")
    return replace(
        gated_decoder(read, layers, qkv_bias=read.flag("use_qkv_bias")),
        norm=NormSpec("layer", read.number("layer_norm_eps"), bias=True),
        parallel=parallel,
        pre_norms="shared" if parallel else "each",
    )


FAMILIES = {
    "stablelm": decoder_family(
        _read,
        vocab_size=50304,
        hidden_size=2560,
        intermediate_size=6912,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.25,
        use_qkv_bias=False,
        qk_layernorm=False,
        use_parallel_residual=False,
    )
}
