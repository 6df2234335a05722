"""T5 and mT5: positions are relative biases only, learned in the first layer of each stack.

The spec follows transformers' `T5Config`; weights of a decoder that scales its output are tied.
mT5 scales nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from everystep.models.config import Fields
from everystep.models.encoder_decoders.network import assemble_encoder_decoder
from everystep.models.encoder_decoders.parameters import (
    EncoderDecoderNames,
    StackNames,
    encoder_decoder_parameters,
)
from everystep.models.encoder_decoders.spec import (
    EncoderDecoderSpec,
    RelativePositions,
    StackSpec,
)
from everystep.models.families import Family
from everystep.models.parameters import Parameter
from everystep.models.spec import MlpSpec, NormSpec
from everystep.nn.activations import ACTIVATIONS


def _mlp(read: Fields) -> MlpSpec:
    """Read an MLP such as "relu" or "gated-gelu", for which transformers takes the tanh
    approximation whatever the name says."""
    kinds = {name: name for name in ACTIVATIONS} | {
        f"gated-{name}": "gelu_new" if name == "gelu" else name for name in ACTIVATIONS
    }
    kind = read.choice("feed_forward_proj", kinds)
    return MlpSpec(read.integer("d_ff"), kinds[kind], gated=kind.startswith("gated-"))


def _t5(config: Mapping[str, Any]) -> EncoderDecoderSpec:
    read = Fields(config)
    scaled = read.flag("scale_decoder_outputs", read.flag("tie_word_embeddings"))
    return _spec(read, read.integer("d_model") ** -0.5 if scaled else None)


def _mt5(config: Mapping[str, Any]) -> EncoderDecoderSpec:
    return _spec(Fields(config), None)


def _spec(read: Fields, output_scale: float | None) -> EncoderDecoderSpec:
    layers, heads = read.count("num_layers"), read.integer("num_heads")
    positions = RelativePositions(
        read.integer("relative_attention_num_buckets", least=4),
        read.integer("relative_attention_max_distance", least=2),
    )
    mlp = _mlp(read)
    encoder = StackSpec(layers, heads, read.integer("d_kv"), mlp, positions)
    decoder_layers = read.count("num_decoder_layers", layers)
    return EncoderDecoderSpec(
        vocab_size=read.integer("vocab_size"),
        width=read.integer("d_model"),
        norm=NormSpec("rms_t5", read.number("layer_norm_epsilon")),
        encoder=encoder,
        decoder=StackSpec(decoder_layers, heads, encoder.head_dim, mlp, positions),
        scale=1.0,
        tied=read.flag("tie_word_embeddings"),
        output_scale=output_scale,
    )


_ROLES: Mapping[str, str] = {
    "norm": "layer.0.layer_norm",
    "own": "layer.0.SelfAttention",
    "across_norm": "layer.1.layer_norm",
    "across": "layer.1.EncDecAttention",
    **{role: role for role in "qkv"},
    "out": "o",
}


def _names(stack: str, *, gated: bool) -> StackNames:
    last = f"layer.{1 if stack == 'encoder' else 2}"
    inner = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    dense = {role: f"{last}.DenseReluDense.{name}" for role, name in inner.items()}
    return StackNames(
        f"{stack}.block",
        f"{stack}.final_layer_norm",
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        f"{stack}.embed_tokens.weight",
        "",
        {
            **_ROLES,
            **dense,
            "mlp_norm": f"{last}.layer_norm",
            "down": f"{last}.DenseReluDense.wo",
        },
    )


def t5_parameters(spec: EncoderDecoderSpec) -> list[Parameter]:
    """Return every tensor of the network, each with its names."""
    names = partial(_names, gated=spec.decoder.mlp.gated)
    stacks = names("encoder"), names("decoder")
    return encoder_decoder_parameters(spec, EncoderDecoderNames("shared.weight", *stacks))


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "relu",
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_MT5_DEFAULTS: Mapping[str, Any] = {
    **_DEFAULTS,
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
_LEFTOVERS = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "*EncDecAttention.relative_attention_bias.weight",
)
FAMILIES = {
    "t5": Family(_DEFAULTS, _t5, t5_parameters, assemble_encoder_decoder, _LEFTOVERS),
    "mt5": Family(_MT5_DEFAULTS, _mt5, t5_parameters, assemble_encoder_decoder, _LEFTOVERS),
}
