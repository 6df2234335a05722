"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows on some layers.

Source of names and defaults: the reference's `Qwen2Config` and `Qwen2ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoder import assemble_decoder, decoder_tensors
from everystep.models.families import Family
from everystep.models.llama import gated_decoder, gated_slots, leftover, read_attention
from everystep.models.rope_config import read_rope
from everystep.models.spec import DecoderSpec, LayerSpec

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a configuration, defaults filled in by the caller."""
    fields = Fields(config)
    attention = replace(read_attention(fields), qkv_bias=True)
    layers = tuple(
        LayerSpec(
            read_rope(config, attention.head_dim, theta=10_000.0, layer_type=kind),
            fields.integer("sliding_window") if kind == _SLIDING else None,
        )
        for kind in layer_types(fields)
    )
    return gated_decoder(fields, attention, layers, mlp_bias=False)


def layer_types(fields: Fields) -> list[str]:
    """Which layers look at a window only: `layer_types`, or those from `max_window_layers` on."""
    count = fields.integer("num_hidden_layers")
    windowed = fields.flag("use_sliding_window", False)
    if not fields.has("layer_types"):
        first = fields.integer("max_window_layers", least=0) if windowed else count
        return [_SLIDING if index >= first else _FULL for index in range(count)]
    kinds = fields.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != count or {*kinds} - {_FULL, _SLIDING}:
        raise fields.wrong("layer_types", f"{count} times {_FULL!r} or {_SLIDING!r}", kinds)
    # The reference keeps no window at all when the switch is off, whatever the types say.
    return list(kinds) if windowed else [_FULL] * count


FAMILY = Family(_DEFAULTS, read_spec, gated_slots, assemble_decoder, decoder_tensors, leftover)
