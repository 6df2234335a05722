"""A GGUF file gives the model that its folder would."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from everystep.errors import EverystepError, FormatError, UnsupportedError
from everystep.files.gguf import read_gguf
from everystep.models import Model
from everystep.models.gguf import build_gguf_model
from tests.files.gguf_writer import write_gguf
from tests.models.tiny import farthest, ids, reference_decoder, with_norms

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = {
    **LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
# What a family's files call its layers' tensors.
LAYERS = {
    "qwen3": {**LAYER, **QK_NORMS},
    "gemma2": GEMMA,
    "gemma3_text": {**GEMMA, **QK_NORMS},
    "phi3": {**LAYER, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
    "starcoder2": {**LAYER, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.5, 3.0],
    "attention_factor": 1.25,
}
PERMUTED = ("llama", "mistral", "smollm3")
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def metadata(kind: str, **changes: Any) -> dict[str, object]:
    """What a converter writes for the tiny sizes."""
    keys: dict[str, object] = {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": 48,
        "feed_forward_length": 80,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": 8,
    }
    found = {f"{kind}.{key}": value for key, value in (keys | changes).items()}
    return {"general.architecture": kind, **{k: v for k, v in found.items() if v is not None}}


def converted(reference: PreTrainedModel, kind: str) -> dict[str, tuple[str, Tensor]]:
    """The tensors as a converter stores them: other names, and Llama's rows of heads in pairs."""
    tied = reference.config.tie_word_embeddings
    stored = {}
    for name, values in reference.state_dict().items():
        if name == "lm_head.weight" and tied:
            continue
        if kind in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = 6 if "q_proj" in name else 2
            halves = values.view(heads, 2, -1, *values.shape[1:])
            values = halves.transpose(1, 2).reshape(values.shape)
        if "gemma" in kind and "norm" in name:
            values = values + 1
        stored[_gguf_name(name, LAYERS.get(kind, LAYER))] = ("F32", values.contiguous())
    return stored


def _gguf_name(name: str, layer: dict[str, str]) -> str:
    role, _, kind = name.rpartition(".")
    if role in OUTER:
        return f"{OUTER[role]}.{kind}"
    _, _, index, inner = role.split(".", 3)
    return f"blk.{index}.{layer[inner]}.{kind}"


def load(path: Path, keys: dict[str, object], tensors: dict[str, tuple[str, Tensor]]) -> Model:
    return build_gguf_model(read_gguf(write_gguf(path / "model.gguf", keys, tensors)))


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_it_computes_what_the_folder_does(tmp_path: Path, kind: str, config: Any) -> None:
    reference = reference_decoder(kind, torch.float32, **config)
    model = load(tmp_path, metadata(kind), converted(reference, kind))
    read = ids(2, 20)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read).logits) < 1e-5
    assert model.config.num_key_value_heads == 2
    assert model.config.rms_norm_eps == 1e-6


WINDOWED = {"attention.sliding_window": 7, "attention.key_length": 10, "rope.dimension_count": 10}
PHI3 = {"attention.layer_norm_rms_epsilon": 1e-5}
GEMMA_SIZES = {"query_pre_attn_scalar": 10}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("mistral", "llama", {"sliding_window": None}, {}),
    "smollm3": ("smollm3", "smollm3", {}, {"block_count": 5, "rope.freq_base": 2e6}),
    "qwen3": (
        *("qwen3", "qwen3", {}),
        {"attention.key_length": 10, "rope.dimension_count": 10},
    ),
    "gemma2": (
        *("gemma2", "gemma2"),
        {**GEMMA_SIZES, "final_logit_softcapping": 9.0, "attn_logit_softcapping": 4.0},
        {**WINDOWED, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 9.0},
    ),
    "gemma3": (
        *("gemma3_text", "gemma3"),
        {
            **GEMMA_SIZES,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            **WINDOWED,
            "block_count": 7,
            "rope.freq_base": 5e5,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": ("phi3", "phi3", {}, PHI3),
    "phi3 with a window": (
        *("phi3", "phi3", {"sliding_window": 7}),
        {**PHI3, "attention.sliding_window": 7},
    ),
    "starcoder2": (
        *("starcoder2", "starcoder2", {"sliding_window": None}),
        {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5},
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_architecture_computes_what_the_folder_does(tmp_path: Path, name: str) -> None:
    kind, architecture, config, keys = FAMILIES[name]
    reference = with_norms(reference_decoder(kind, torch.float32, **config))
    model = load(tmp_path, metadata(architecture, **keys), converted(reference, kind))
    read = ids(2, 30)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read, use_cache=False).logits) < 1e-5


def test_the_largest_gemmas_scale_by_the_mean_size_of_a_head(tmp_path: Path) -> None:
    for kind, architecture, layers in (("gemma2", "gemma2", 46), ("gemma3_text", "gemma3", 62)):
        sizes = {"num_hidden_layers": layers, "query_pre_attn_scalar": 8}
        reference = reference_decoder(kind, torch.float32, **sizes)
        keys = metadata(architecture, **WINDOWED, block_count=layers)
        model = load(tmp_path, keys, converted(reference, kind))
        assert model.config.query_pre_attn_scalar == 48 // 6
        assert model.spec.attention.scale == 8**-0.5


@pytest.mark.parametrize("length", [12, 40])
def test_a_stretched_phi3_has_factors_for_short_rows_and_long_ones(
    tmp_path: Path, length: int
) -> None:
    trained = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    reference = reference_decoder("phi3", torch.float32, rope_parameters=LONG, **trained)
    factors = {
        f"rope_factors_{one}.weight": ("F32", torch.tensor(LONG[f"{one}_factor"]))
        for one in ("short", "long")
    }
    keys = metadata(
        "phi3",
        **{"rope.scaling.original_context_length": 16, "rope.scaling.attn_factor": 1.25, **PHI3},
    )
    model = load(tmp_path, keys, converted(reference, "phi3") | factors)
    read = ids(2, length)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read, use_cache=False).logits) < 1e-5


def test_llama3_comes_as_one_divisor_per_frequency(tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32, rope_parameters=LLAMA3)
    plain = reference_decoder("llama", torch.float32)
    stretched, unstretched = (m.model.rotary_emb.inv_freq for m in (reference, plain))
    tensors = converted(reference, "llama") | {
        "rope_freqs.weight": ("F32", unstretched / stretched)
    }
    model = load(tmp_path, metadata("llama"), tensors)
    read = ids(2, 60)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read).logits) < 1e-5


def test_a_linear_factor_divides_beside_the_divisors(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    reference = reference_decoder("llama", torch.float32, rope_parameters=linear)
    halves = {"rope_freqs.weight": ("F32", torch.full((4,), 2.0))}
    keys = metadata("llama", **{"rope.scaling.factor": 2.0})
    model = load(tmp_path, keys, converted(reference, "llama") | halves)
    read = ids(2, 60)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read).logits) < 1e-5
    with pytest.raises(UnsupportedError, match="yarn has no implementation with factors"):
        load(
            tmp_path,
            {**keys, "llama.rope.scaling.type": "yarn"},
            converted(reference, "llama") | halves,
        )


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
        ({"rope.scaling.factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
                "rope.scaling.yarn_beta_fast": 3.0,
                "rope.scaling.yarn_beta_slow": 0.5,
                "rope.scaling.attn_factor": 1.5,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 3.0,
                "beta_slow": 0.5,
                "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1.0),
            },
        ),
    ],
    ids=["linear", "yarn", "no type", "the old name", "no trained length", "turns and factor"],
)
def test_scaled_ropes(tmp_path: Path, keys: Any, rope: Any) -> None:
    parameters = {**rope, "rope_theta": 10000.0}
    reference = reference_decoder("qwen2", torch.float32, rope_parameters=parameters)
    model = load(tmp_path, metadata("qwen2", **keys), converted(reference, "qwen2"))
    read = ids(2, 60)
    with torch.no_grad():
        assert farthest(model.forward(read), reference(read).logits) < 1e-5


@pytest.mark.parametrize(
    ("changes", "kind", "part"),
    [
        ({"block_count": None}, FormatError, "llama.block_count"),
        ({"embedding_length": "48"}, FormatError, "llama.embedding_length"),
        ({"expert_count": 8}, UnsupportedError, "llama.expert_count"),
        ({"rope.scaling.type": "spiral"}, UnsupportedError, "spiral"),
        ({"feed_forward_length": 81}, FormatError, "mlp"),
        ({"block_count": 4}, FormatError, "model.layers.3"),
    ],
    ids=str,
)
def test_wrong_metadata(
    tmp_path: Path, changes: Any, kind: type[EverystepError], part: str
) -> None:
    tensors = converted(reference_decoder("llama", torch.float32), "llama")
    with pytest.raises(kind, match=part):
        load(tmp_path, metadata("llama", **changes), tensors)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention.head_count": 5}, r"llama\.attention\.head_count"),
        ({"attention.key_length": 7, "rope.dimension_count": 7}, r"llama\.attention\.key_length"),
        ({"rope.dimension_count": 9}, r"llama\.rope\.dimension_count"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 1e12},
            r"llama\.rope\.scaling\.yarn_beta_fast is impossible",
        ),
        ({"feed_forward_length": 81}, r"does not fit .*model\.gguf"),
    ],
    ids=str,
)
def test_errors_speak_of_the_file_and_its_keys(tmp_path: Path, changes: Any, text: str) -> None:
    tensors = converted(reference_decoder("llama", torch.float32), "llama")
    with pytest.raises((FormatError, UnsupportedError), match=text) as caught:
        load(tmp_path, metadata("llama", **changes), tensors)
    assert "config.json" not in str(caught.value)
    assert str(tmp_path / "model.gguf") in str(caught.value)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'mamba'"):
        load(tmp_path, {"general.architecture": "mamba"}, {"x": ("F32", torch.ones(1))})


def test_an_unknown_tensor(tmp_path: Path) -> None:
    tensors = converted(reference_decoder("llama", torch.float32), "llama")
    tensors["blk.0.ssm_a.weight"] = ("F32", torch.ones(1))
    with pytest.raises(FormatError, match=r"ssm_a"):
        load(tmp_path, metadata("llama"), tensors)


@pytest.mark.parametrize("number", ["00", "²", "+0", "0_0", " 0", "9" * 5000])
def test_a_layer_has_one_name(tmp_path: Path, number: str) -> None:
    tensors = converted(reference_decoder("llama", torch.float32), "llama")
    tensors[f"blk.{number}.attn_q.weight"] = tensors["blk.0.attn_q.weight"]
    with pytest.raises(FormatError, match=r"no place for|name"):
        load(tmp_path, metadata("llama"), tensors)
