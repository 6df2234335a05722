"""Logits are transformers': within 1e-10 in float64, 1e-5 of the largest logit in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.models import build_model
from tests.models.tiny import (
    Tensors,
    farthest,
    ids,
    ours,
    reference_decoder,
    reference_t5,
    with_norms,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.5, 3.0]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn in full": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        **FACTORS,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one head each": ("llama", {"num_key_value_heads": 6}),
    "llama, wide heads, tied": ("llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3 with biases and windows": (
        "qwen3",
        {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 with windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "no_rope_layer_interval": 2},
    ),
    "smollm3 with named layers": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 1, 0, 1],
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "use_sliding_window": True,
            "sliding_window": 7,
            "mlp_bias": True,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 without caps": (
        "gemma2",
        {"final_logit_softcapping": None, "attn_logit_softcapping": None, "attention_bias": True},
    ),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "gemma3 with ropes and a cap": (
        "gemma3_text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", {}),
    "phi3 with a window": ("phi3", {"sliding_window": 7}),
    "phi3 that turns a part of each head": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 with a window, without biases": (
        "starcoder2",
        {"sliding_window": 7, "use_bias": False, "tie_word_embeddings": False},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2 with weaker later layers, untied": (
        "gpt2",
        {
            "scale_attn_by_inverse_layer_idx": True,
            "tie_word_embeddings": False,
            "activation_function": "relu",
            "n_inner": None,
        },
    ),
    "gpt2 with raw scores": ("gpt2", {"scale_attn_weights": False}),
    "opt": ("opt", {}),
    "opt without biases, untied": (
        "opt",
        {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one branch after the other": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "falcon": ("falcon", {}),
    "falcon with groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon with groups and one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "falcon, one key each, one branch after the other": (
        "falcon",
        {
            "multi_query": False,
            "parallel_attn": False,
            "bias": True,
            "tie_word_embeddings": False,
            "activation": "relu",
            "ffn_hidden_size": 80,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 with biases, tied": (
        "olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 3},
    ),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, one key each, untied": (
        "gpt_bigcode",
        {"multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False},
    ),
    "phi": ("phi", {"rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 500.0}}),
    "phi with normed queries, tied": (
        "phi",
        {"qk_layernorm": True, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm, branches beside each other": (
        "stablelm",
        {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"partial_rotary_factor": 0.75, "rope_theta": 500.0},
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral with a window, of one expert each": (
        "mixtral",
        {"sliding_window": 7, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    ),
    "qwen3 with experts": ("qwen3_moe", {}),
    "qwen3 with experts in every other layer, whose shares add up to 1": (
        "qwen3_moe",
        {
            "decoder_sparse_step": 2,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "qwen2 with types of layers": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
each_type = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def compare(kind: str, dtype: torch.dtype, length: int, **config: Any) -> None:
    reference = with_norms(reference_decoder(kind, dtype, **config))
    read = ids(3, length)
    with torch.no_grad():
        expected = reference(read, use_cache=False).logits
    found = ours(reference).forward(read)
    assert found.dtype == dtype
    assert farthest(found, expected) < TOLERANCE[dtype]


@each_type
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, dtype: torch.dtype) -> None:
    kind, config = FAMILIES[family]
    compare(kind, dtype, 40, **config)


@each_type
@pytest.mark.parametrize("length", [12, 100])
@pytest.mark.parametrize("rope", ROPES)
def test_ropes_within_and_beyond_the_trained_length(
    rope: str, length: int, dtype: torch.dtype
) -> None:
    parameters = {"rope_theta": 10000.0, **ROPES[rope]}
    compare("llama", dtype, length, rope_parameters=parameters)


def test_the_older_form_of_rope_scaling() -> None:
    reference = reference_decoder("llama", torch.float64)
    config = reference.config.to_dict()
    del config["rope_parameters"]
    older = {**config, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    expected = reference_decoder("llama", torch.float64, rope_parameters=newer)
    expected.load_state_dict(reference.state_dict())
    found = build_model(older, Tensors(reference.state_dict()), dtype=torch.float64)
    read = ids(2, 20)
    with torch.no_grad():
        assert farthest(found.forward(read), expected(read).logits) < 1e-10


@each_type
@pytest.mark.parametrize("family", ["llama", "qwen2 with windows"])
def test_padding_on_both_sides_is_not_seen(family: str, dtype: torch.dtype) -> None:
    kind, config = FAMILIES[family]
    reference = reference_decoder(kind, dtype, **config)
    read = ids(3, 20)
    mask = torch.ones_like(read)
    mask[0, :6] = 0
    mask[1, -5:] = 0
    with torch.no_grad():
        expected = reference(read, attention_mask=mask, use_cache=False).logits
    found = ours(reference).forward(read, mask)
    assert farthest(found[mask > 0], expected[mask > 0]) < TOLERANCE[dtype]


def test_positions_and_embeddings_may_be_given() -> None:
    reference = reference_decoder("llama", torch.float64)
    embeds = torch.randn(2, 9, 48, dtype=torch.float64)
    places = torch.tensor([[0, 1, 2, 5, 6, 7, 7, 8, 30], list(range(3, 12))])
    # With positions but no mask jumps are taken for the seams of packed sequences.
    given = {"inputs_embeds": embeds, "position_ids": places, "attention_mask": torch.ones(2, 9)}
    with torch.no_grad():
        expected = reference(**given, use_cache=False).logits
    found = ours(reference).forward(None, torch.ones(2, 9).long(), places, embeds)
    assert farthest(found, expected) < 1e-10


@each_type
@pytest.mark.parametrize("mlp", ["relu", "gated-gelu", "gated-silu"])
def test_t5_with_a_padded_encoder(mlp: str, dtype: torch.dtype) -> None:
    reference = reference_t5(dtype, feed_forward_proj=mlp)
    read, written = ids(3, 30), ids(3, 30)
    mask = torch.ones_like(read)
    mask[0, 7:] = 0
    mask[2, :3] = 0
    with torch.no_grad():
        expected = reference(input_ids=read, attention_mask=mask, decoder_input_ids=written).logits
    found = ours(reference).forward(read, mask, decoder_input_ids=written)
    assert farthest(found, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_narrow_types_run_and_stay_close(kind: str, dtype: torch.dtype, bound: float) -> None:
    reference = reference_decoder(kind, torch.float32, initializer_range=0.05)
    read = ids(2, 20)
    with torch.no_grad():
        expected = reference(read).logits
    found = ours(reference, dtype).forward(read)
    assert found.dtype == dtype
    assert farthest(found, expected) < bound
