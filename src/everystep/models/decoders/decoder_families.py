"""What several families of decoders read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder
from everystep.models.families import Family
from everystep.models.parameters import NAMES, CheckpointLayout, decoder_parameters
from everystep.models.rope_config import read_rope
from everystep.models.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    QkNorm,
)
from everystep.nn.activations import ACTIVATIONS
from everystep.nn.rotary import Rope

FULL, SLIDING = "full_attention", "sliding_attention"
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def decoder_family(
    read_spec: Callable[[Mapping[str, Any]], DecoderSpec],
    names: Mapping[str, str] = NAMES,
    **defaults: Any,
) -> Family:
    """Make a family whose checkpoints use these names."""
    return Family(
        {**_DEFAULTS, **defaults},
        read_spec,
        partial(decoder_parameters, layout=CheckpointLayout(names)),
        assemble_decoder,
        leftovers=("*rotary_emb.inv_freq", f"{names['head']}.weight"),
    )


def gated_decoder(
    read: Fields,
    layers: Sequence[LayerSpec],
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm | None = None,
    activation: str = "hidden_act",
) -> DecoderSpec:
    """Return a decoder with RMS norms and a gated MLP, whose activation stands under that key."""
    heads, kv_heads, size = heads_of(read)
    attention = AttentionSpec(heads, kv_heads, size, size**-0.5, qkv_bias, out_bias, qk_norm)
    inner, act = read.integer("intermediate_size"), read.choice(activation, ACTIVATIONS)
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("hidden_size"),
        norm=NormSpec("rms", read.number("rms_norm_eps")),
        attention=attention,
        mlp=MlpSpec(inner, act, bias=mlp_bias),
        layers=tuple(layers),
        tied=read.flag("tie_word_embeddings"),
    )


def plain_decoder(
    read: Fields,
    layers: Sequence[LayerSpec],
    attention: AttentionSpec,
    *,
    eps: float,
    inner: int,
    activation: str = "hidden_act",
    mlp_bias: bool = True,
) -> DecoderSpec:
    """Return a decoder with layer norms and an MLP without gate, its activation under that key."""
    act = read.choice(activation, ACTIVATIONS)
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("hidden_size"),
        norm=NormSpec("layer", eps, bias=True),
        attention=attention,
        mlp=MlpSpec(inner, act, gated=False, bias=mlp_bias),
        layers=tuple(layers),
        tied=read.flag("tie_word_embeddings"),
    )


def heads_of(read: Fields) -> tuple[int, int, int]:
    """Return how many heads of queries and of keys there are, and their size."""
    width, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    shared = read.integer("num_key_value_heads", heads)
    if heads % shared:
        raise read.wrong("num_key_value_heads", f"a divisor of {heads} heads", shared)
    if not read.has("head_dim") and width % heads:
        raise read.wrong("num_attention_heads", f"a divisor of hidden_size = {width}", heads)
    return heads, shared, read.integer("head_dim", width // heads)


def full_heads_of(read: Fields) -> tuple[int, int]:
    """Return how many heads there are, each with keys of its own, and their size.

    The size is a share of the width.
    """
    width, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if width % heads:
        raise read.wrong("num_attention_heads", f"a divisor of hidden_size = {width}", heads)
    return heads, width // heads


def rope_of(read: Fields, theta: float = 10_000.0) -> Rope:
    """Return the rope that all layers have; `theta` is the family's default base."""
    return read_rope(read, heads_of(read)[2], theta=theta)


def window_of(read: Fields) -> int | None:
    """Return the window that all layers have, None without one."""
    return read.integer("sliding_window") if read.has("sliding_window") else None


def layer_types(read: Fields, usual: Sequence[str]) -> list[str]:
    """Return what each layer looks at: `layer_types`, or the `usual` ones without them."""
    if not read.has("layer_types"):
        return list(usual)
    kinds = read.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != len(usual) or {*kinds} - {FULL, SLIDING}:
        raise read.wrong("layer_types", f"{len(usual)} times {FULL!r} or {SLIDING!r}", kinds)
    return list(kinds)
