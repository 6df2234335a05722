"""What several families with an encoder and a decoder read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from everystep.models.config import Fields
from everystep.models.encoder_decoders.network import assemble_encoder_decoder
from everystep.models.encoder_decoders.parameters import (
    NAMES,
    EncoderDecoderNames,
    encoder_decoder_parameters,
)
from everystep.models.encoder_decoders.spec import (
    AbsolutePositions,
    EncoderDecoderSpec,
    StackSpec,
)
from everystep.models.families import Family
from everystep.models.spec import MlpSpec, NormSpec
from everystep.nn.activations import ACTIVATIONS

LAYER_NORM = NormSpec("layer", 1e-5, bias=True)
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "scale_embedding": False,
    "use_cache": True,
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
}


def encoder_decoder_family(
    read_spec: Callable[[Mapping[str, Any]], EncoderDecoderSpec],
    names: EncoderDecoderNames = NAMES,
    leftovers: tuple[str, ...] = (),
    **defaults: Any,
) -> Family:
    """Make a family whose checkpoints use these names; copies of tied tables are let through."""
    copies = (names.shared, names.encoder.embed, names.decoder.embed, names.head)
    return Family(
        {**_DEFAULTS, **defaults},
        read_spec,
        partial(encoder_decoder_parameters, names=names),
        assemble_encoder_decoder,
        (*copies, *leftovers),
    )


def stack_of(read: Fields, which: str, positions: AbsolutePositions) -> StackSpec:
    """Read the "encoder" or "decoder" of a configuration whose keys begin so."""
    width, heads = read.integer("d_model"), read.integer(f"{which}_attention_heads")
    if width % heads:
        raise read.wrong(f"{which}_attention_heads", f"a divisor of d_model = {width}", heads)
    activation = read.choice("activation_function", ACTIVATIONS)
    mlp = MlpSpec(read.integer(f"{which}_ffn_dim"), activation, gated=False, bias=True)
    return StackSpec(read.count(f"{which}_layers"), heads, width // heads, mlp, positions)


def embed_scale_of(read: Fields) -> float | None:
    """Return the root of the width where `scale_embedding` asks for it."""
    root: float = read.integer("d_model") ** 0.5
    return root if read.flag("scale_embedding") else None


def translator(
    read: Fields,
    positions: AbsolutePositions,
    *,
    pre_norm: bool = False,
    embed_norm: bool = False,
) -> EncoderDecoderSpec:
    """Return a network with layer norms, biases everywhere, also on logits, from ids to ids."""
    tied, size = read.flag("tie_word_embeddings"), read.integer("vocab_size")
    return EncoderDecoderSpec(
        vocab_size=size,
        width=read.integer("d_model"),
        norm=LAYER_NORM,
        encoder=stack_of(read, "encoder", positions),
        decoder=stack_of(read, "decoder", positions),
        bias=True,
        key_bias=True,
        pre_norm=pre_norm,
        embed_norm=embed_norm,
        embed_scale=embed_scale_of(read),
        shared=tied,
        source_vocab_size=size,
        tied=tied,
        logits_bias=True,
    )
