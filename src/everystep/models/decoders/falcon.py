"""Falcon: one key head for all queries in 7B, several groups of them in 40B and 11B; attention and
MLP stand beside each other and share a norm, or have one each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import decoder_family, full_heads_of, plain_decoder
from everystep.models.parameters import NAMES, CheckpointLayout, Parameter, decoder_parameters
from everystep.models.rope_config import read_rope
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    PreNorms,
)

_NAMES = {
    **NAMES,
    "embed": "transformer.word_embeddings",
    "norm": "transformer.ln_f",
    "layers": "transformer.h",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
_OWN_NORMS = {"attention_norm": "ln_attn", "mlp_norm": "ln_mlp"}


def _read(config: Mapping[str, Any]) -> DecoderSpec:
    read = Fields(config)
    if read.flag("alibi"):
        raise UnsupportedError(
            "config.json: alibi, which takes distances off scores, is not supported",
            wanted="false",
            got="true",
        )
    (heads, size), bias = full_heads_of(read), read.flag("bias")
    parallel, pre_norms = _norms(read)
    rope = read_rope(read, size)
    if rope.dim != size:
        raise read.wrong("partial_rotary_factor", "heads that turn whole", rope.dim / size)
    spec = plain_decoder(
        read,
        [LayerSpec(rope)] * read.count("num_hidden_layers"),
        AttentionSpec(heads, _key_heads(read, heads), size, size**-0.5, bias, bias),
        eps=read.number("layer_norm_epsilon"),
        inner=read.integer("ffn_hidden_size", 4 * read.integer("hidden_size")),
        activation="activation",
        mlp_bias=bias,
    )
    return replace(spec, parallel=parallel, pre_norms=pre_norms)


def _key_heads(read: Fields, heads: int) -> int:
    """Return the number of key heads.

    Before the newer architecture either all queries share a key, or none do.
    """
    count = read.integer("num_kv_heads", heads)
    if read.flag("new_decoder_architecture"):
        if heads % count:
            raise read.wrong("num_kv_heads", f"a divisor of {heads} heads", count)
        return count
    if read.flag("multi_query"):
        return 1
    if count != heads:
        raise read.wrong("num_kv_heads", f"{heads}, as without multi_query", count)
    return heads


def _norms(read: Fields) -> tuple[bool, PreNorms]:
    """Return whether attention and MLP are parallel, and whether they share a norm."""
    parallel, newer = read.flag("parallel_attn"), read.flag("new_decoder_architecture")
    count = read.integer("num_ln_in_parallel_attn", 2 if newer else 1)
    if newer and not parallel:
        raise read.wrong("parallel_attn", "true, as with new_decoder_architecture", parallel)
    if parallel and count not in ((1, 2) if newer else (1,)):
        wanted = "1 or 2" if newer else "1, as without new_decoder_architecture"
        raise read.wrong("num_ln_in_parallel_attn", wanted, count)
    return parallel, "shared" if parallel and count == 1 else "each"


def _parameters(spec: DecoderSpec) -> Iterable[Parameter]:
    own = _OWN_NORMS if spec.parallel and spec.pre_norms == "each" else {}
    return decoder_parameters(spec, CheckpointLayout({**_NAMES, **own}, interleaved=True))


_FAMILY = decoder_family(
    _read,
    _NAMES,
    vocab_size=65024,
    hidden_size=4544,
    num_attention_heads=71,
    activation="gelu",
    max_position_embeddings=2048,
    layer_norm_epsilon=1e-5,
    alibi=False,
    bias=False,
    multi_query=True,
    parallel_attn=True,
    new_decoder_architecture=False,
    tie_word_embeddings=True,
)
FAMILIES = {"falcon": replace(_FAMILY, parameters=_parameters, aliases={"n_embed": "hidden_size"})}
