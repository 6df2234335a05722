"""Tiny models with random weights: real in every part, and done in a blink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everystep.api.load import from_weights
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.models import complete_config
from everystep.models.families import find_family

_LLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def tiny_llama(seed: int = 0, dtype: torch.dtype = torch.float64, **config: Any) -> LanguageModel:
    """A two-layer Llama with a vocabulary of 48; `config` overrides values of its config.json.

    Weights are drawn widely, so that its choices differ from position to position.
    """
    values = {**_LLAMA, **config}
    settings = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=3)
    weights = _llama_weights(values, seed)
    return from_weights(values, weights, dtype=dtype, generation_config=settings)


def tiny_document(seed: int = 0, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A document model for the ids of `tiny_tokenizer`, whose pages are four patches of 16 pixels a
    side."""
    sizes = {"hidden_size": 32, "input_size": 32, "coordinate_size": 5, "shape_size": 6}
    own = {"vocab_size": 320, "max_position_embeddings": 4096, "layout_config": sizes}
    values = complete_config({**_LLAMA, "model_type": "doclayllm", **own})
    weights = _llama_weights(values, seed)
    generator = torch.Generator().manual_seed(seed)
    for plan in find_family("doclayllm").plan_encoders(values):
        for one in plan.parameters:
            (part,) = one.parts
            weights[part.name] = torch.randn(one.shape, generator=generator) * 0.3
    settings = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return from_weights(values, weights, dtype=dtype, generation_config=settings)


def _llama_weights(values: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ("hidden_size", "intermediate_size", "vocab_size")
    hidden, inner, vocabulary = (values[name] for name in names)
    kv = hidden // values["num_attention_heads"] * values["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> Tensor:
        wide = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return wide * 2.0 / columns**0.5

    weights = {
        "model.embed_tokens.weight": drawn(vocabulary, hidden) * hidden**0.5,
        "model.norm.weight": torch.ones(hidden, dtype=torch.float64),
        "lm_head.weight": drawn(vocabulary, hidden),
    }
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = drawn(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.float64)
    return weights
