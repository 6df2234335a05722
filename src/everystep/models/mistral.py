"""Mistral: Llama with a window on every layer.

Source of names and defaults: the reference's `MistralConfig` and `MistralForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder, decoder_tensors
from everystep.models.families import Family
from everystep.models.llama import gated_decoder, gated_slots, leftover, read_attention
from everystep.models.rope_config import read_rope
from everystep.models.spec import DecoderSpec, LayerSpec

# `sliding_window` is not among them: a null means no window, and its absence 4096.
_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_WINDOW = 4096


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a configuration, defaults filled in by the caller."""
    fields = Fields(config)
    attention = read_attention(fields)
    rope = read_rope(config, attention.head_dim, theta=10_000.0)
    window = _WINDOW if "sliding_window" not in config else None
    if fields.has("sliding_window"):
        window = fields.integer("sliding_window")
    layers = (LayerSpec(rope, window),) * fields.integer("num_hidden_layers")
    return gated_decoder(fields, attention, layers, mlp_bias=False)


FAMILY = Family(_DEFAULTS, read_spec, gated_slots, assemble_decoder, decoder_tensors, leftover)
