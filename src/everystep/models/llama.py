"""Llama 2 and 3, SmolLM2 and everything else that says `model_type: llama`.

Maps configuration keys and weight names to the decoder's; source of names and defaults: the
reference's `LlamaConfig` and `LlamaForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder, decoder_tensors
from everystep.models.families import Family
from everystep.models.names import Names, Slot, decoder_slots
from everystep.models.rope_config import read_rope
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from everystep.nn.activations import ACTIVATIONS

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a configuration, defaults filled in by the caller."""
    fields = Fields(config)
    attention = read_attention(fields)
    bias = fields.flag("attention_bias", False)
    rope = read_rope(config, attention.head_dim, theta=10_000.0)
    return gated_decoder(
        fields,
        replace(attention, qkv_bias=bias, out_bias=bias),
        (LayerSpec(rope),) * fields.integer("num_hidden_layers"),
        mlp_bias=fields.flag("mlp_bias", False),
    )


def read_attention(fields: Fields) -> AttentionSpec:
    """Heads and their sizes, scaled by the root of the head's size."""
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    shared = fields.integer("num_key_value_heads", heads)
    if heads % shared:
        raise fields.wrong("num_key_value_heads", f"a divisor of {heads} heads", shared)
    if not fields.has("head_dim") and width % heads:
        raise fields.wrong("num_attention_heads", f"a divisor of hidden_size = {width}", heads)
    head_dim = fields.integer("head_dim", width // heads)
    return AttentionSpec(heads, shared, head_dim, scale=head_dim**-0.5)


def gated_decoder(
    fields: Fields, attention: AttentionSpec, layers: tuple[LayerSpec, ...], *, mlp_bias: bool
) -> DecoderSpec:
    """A decoder with RMS norms and a gated MLP, the frame of many families."""
    return DecoderSpec(
        vocab_size=fields.integer("vocab_size"),
        width=fields.integer("hidden_size"),
        norm=NormSpec("rms", fields.number("rms_norm_eps")),
        attention=attention,
        mlp=MlpSpec(
            fields.integer("intermediate_size"),
            fields.choice("hidden_act", ACTIVATIONS, "silu"),
            bias=mlp_bias,
        ),
        layers=layers,
        tied=fields.flag("tie_word_embeddings", False),
    )


def gated_slots(spec: DecoderSpec) -> list[Slot]:
    """The slots of a decoder under the names that most families share."""
    return decoder_slots(spec, Names())


def leftover(spec: DecoderSpec, name: str) -> bool:
    """Whether checkpoints may hold this for nothing: frequencies, a copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight")


FAMILY = Family(_DEFAULTS, read_spec, gated_slots, assemble_decoder, decoder_tensors, leftover)
