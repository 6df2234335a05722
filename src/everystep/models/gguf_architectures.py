"""What GGUF files of each architecture call things, and what their converters did to tensors.

The format's own programs hold some values in their code instead of the file, such as the windows'
pattern of Gemma; those stand here too. Source: llama.cpp's converter and model definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everystep.models.config import Fields

_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS: Mapping[str, str] = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_GEMMA: Mapping[str, str] = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WINDOW = "attention.sliding_window"

Derived = Callable[[Fields, str, Mapping[str, Any]], Mapping[str, Any]]
"""Of the metadata, their prefix and what is known: further values of a config.json."""


@dataclass(frozen=True)
class Architecture:
    """`family`: the `model_type`. `layer`: names of a layer's tensors -> those of checkpoints.

    `permuted`: rows of queries' and keys' heads are in pairs. `one_more`: norms hold 1 + weight.
    `epsilon`: the config's name of the norms' epsilon, `epsilon_key` the file's. `derived`: what is
    found out otherwise.
    """

    family: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permuted: bool = False
    one_more: bool = False
    epsilon: str = "rms_norm_eps"
    epsilon_key: str = "attention.layer_norm_rms_epsilon"
    derived: Derived | None = None


def _gemma(read: Fields, own: str, config: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Return what Gemma adds.

    The largest model of a generation scales by the mean size of a head, not by that of its own
    heads.
    """
    mean = config["hidden_size"] // config["num_attention_heads"]
    size = mean if config["num_hidden_layers"] == largest else config.get("head_dim", mean)
    window = read.integer(f"{own}{_WINDOW}")
    return {"query_pre_attn_scalar": size, "sliding_window": window}


def _gemma2(read: Fields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    caps = {
        f"{one}_logit_softcapping": read.number(f"{own}{one}_logit_softcapping", default)
        for one, default in (("attn", 50.0), ("final", 30.0))
    }
    return {**_gemma(read, own, config, 46), **caps}


def _gemma3(read: Fields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    local = read.number(f"{own}rope.freq_base_swa", 10_000.0)
    found = {**_gemma(read, own, config, 62), "rope_local_base_freq": local}
    if read.has(f"{own}final_logit_softcapping"):
        found["final_logit_softcapping"] = read.number(f"{own}final_logit_softcapping")
    return found


def _window(read: Fields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    given = read.values.get(f"{own}{_WINDOW}")
    return {"sliding_window": read.integer(f"{own}{_WINDOW}")} if given else {}


def _phi3(read: Fields, own: str, config: Mapping[str, Any]) -> dict[str, Any]:
    trained = f"{own}rope.scaling.original_context_length"
    length = read.integer(trained, config["max_position_embeddings"])
    return {**_window(read, own, config), "original_max_position_embeddings": length}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", permuted=True),
    "smollm3": Architecture("smollm3", permuted=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3", {**_LAYER, **_QK_NORMS}),
    "gemma2": Architecture("gemma2", _GEMMA, one_more=True, derived=_gemma2),
    "gemma3": Architecture("gemma3_text", {**_GEMMA, **_QK_NORMS}, one_more=True, derived=_gemma3),
    "phi3": Architecture(
        "phi3",
        {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        derived=_phi3,
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        epsilon_key="attention.layer_norm_epsilon",
        derived=_window,
    ),
}
"""The architectures by the names that files have for them."""

# Each changes what a model computes, and is understood where an architecture reads it.
REFUSED: Mapping[str, tuple[str, ...]] = {
    "expert_count": (),
    "attention.sliding_window": ("gemma2", "gemma3", "phi3", "starcoder2"),
    "attention.scale": (),
    "attention.clamp_kqv": (),
    "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3"),
    "embedding_scale": (),
    "residual_scale": (),
    "logit_scale": (),
    "rope.scaling.attn_factor": ("phi3",),
}
"""Key -> the architectures that read it."""
