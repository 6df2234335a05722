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


def tiny_vision(seed: int = 0, dtype: torch.dtype = torch.float64, **config: Any) -> LanguageModel:
    """A Qwen3-VL with three layers, a tower of three blocks, patches of 4 x 4 pixels and a
    vocabulary of 48; `config` overrides values of its config.json."""
    values: dict[str, Any] = {
        "model_type": "qwen3_vl",
        "text_config": {
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "rope_scaling": {"mrope_section": [6, 5, 5]},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 2],
        },
        "image_token_id": 40,
        "video_token_id": 41,
        "vision_start_token_id": 42,
        "vision_end_token_id": 43,
        **config,
    }
    generator = torch.Generator().manual_seed(seed)
    family = find_family(values["model_type"])
    weights = {}
    for one in family.parameters(family.read_spec(complete_config(values))):
        for part in one.parts:
            shape = (part.stop - part.start, *one.shape[1:])
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            scale = 2.0 / (drawn[0].numel() ** 0.5)
            weights[part.name] = drawn * scale if drawn.dim() > 1 else 1 + drawn * 0.1
    settings = GenerationConfig(eos_token_id=2, pad_token_id=3)
    return from_weights(values, weights, dtype=dtype, generation_config=settings)
