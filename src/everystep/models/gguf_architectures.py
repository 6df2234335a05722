"""What GGUF files of each architecture call things, and what their converters did to tensors.

The format's own programs hold some values in their code instead of the file, such as the windows'
pattern of Gemma; those stand here too. Source: llama.cpp's converter and model definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from everystep.errors import UnsupportedError, nearest, shown
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
_PATTERN = "attention.sliding_window_pattern"
_GEMMAS = frozenset({_WINDOW, _PATTERN, "final_logit_softcapping"})

Derived = Callable[[Fields, str, Mapping[str, Any]], Mapping[str, Any]]
"""Of the metadata, their prefix and what is known: further values of a config.json."""


@dataclass(frozen=True)
class Architecture:
    """`family`: the `model_type`. `layer`: names of a layer's tensors -> those of checkpoints.

    `permuted`: rows of queries' and keys' heads are in pairs. `one_more`: norms hold 1 + weight.
    `epsilon`: the config's name of the norms' epsilon, `epsilon_key` the file's. `derived`: what is
    found out otherwise, from the keys `own`.
    """

    family: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    permuted: bool = False
    one_more: bool = False
    epsilon: str = "rms_norm_eps"
    epsilon_key: str = "attention.layer_norm_rms_epsilon"
    derived: Derived | None = None
    own: frozenset[str] = frozenset()

    def honours(self, key: str) -> bool:
        """Return whether the key, without its prefix, is read into the configuration."""
        return key in HONOURED or key in self.own or key == self.epsilon_key


def _gemma(read: Fields, own: str, config: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Return what Gemma adds.

    The largest model of a generation scales by the mean size of a head, not by that of its own
    heads.
    """
    mean = config["hidden_size"] // config["num_attention_heads"]
    size = mean if config["num_hidden_layers"] == largest else config.get("head_dim", mean)
    window = read.integer(f"{own}{_WINDOW}")
    found = {"query_pre_attn_scalar": size, "sliding_window": window}
    if read.has(f"{own}{_PATTERN}"):
        found["layer_types"] = _layer_types(read, f"{own}{_PATTERN}", config["num_hidden_layers"])
    return found


def _layer_types(read: Fields, key: str, layers: int) -> list[str]:
    """Read which layers have a window: all but every n-th, or as an array says for each."""
    value = read.values[key]
    if isinstance(value, list):
        if len(value) != layers or not all(type(one) in (bool, int) for one in value):
            raise read.wrong(key, f"a truth value for each of {layers} layers", value)
        windowed = [bool(one) for one in value]
    else:
        every = read.integer(key, least=0)
        windowed = [every == 0 or (index + 1) % every != 0 for index in range(layers)]
    return ["sliding_attention" if one else "full_attention" for one in windowed]


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
    "gemma2": Architecture(
        "gemma2",
        _GEMMA,
        one_more=True,
        derived=_gemma2,
        own=_GEMMAS | {"attn_logit_softcapping"},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        {**_GEMMA, **_QK_NORMS},
        one_more=True,
        derived=_gemma3,
        own=_GEMMAS | {"rope.freq_base_swa"},
    ),
    "phi3": Architecture(
        "phi3",
        {**_LAYER, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        derived=_phi3,
        own=frozenset({_WINDOW}),
    ),
    "starcoder2": Architecture(
        "starcoder2",
        {**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon="norm_epsilon",
        epsilon_key="attention.layer_norm_epsilon",
        derived=_window,
        own=frozenset({_WINDOW}),
    ),
}
"""The architectures by the names that files have for them."""

HONOURED = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
"""The keys that are read for every architecture, beside those of its own and its epsilon."""

PER_LAYER = ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
"""Keys whose value may be an array with one for each layer."""

REPEATED: Mapping[str, str] = {
    "attention.value_length": "head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count_swa": "rotated",
    "rope.freq_base_swa": "rope_theta",
}
"""Keys that may say only what another said: of values as of keys, of layers with a window as of
the others."""

IDLE = frozenset(
    {
        "vocab_size",  # the table of embeddings says it
        "tensor_data_layout",
        "features_length",
        "pooling_type",
        "rope.scaling.finetuned",
    }
)
"""Keys that change nothing of what a decoder computes."""

UNUSED: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "n_deepstack_layers": (0,),
    "use_parallel_residual": (False,),
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "residual_scale": (0, 1),
    "logit_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,),
}
"""Keys without implementation, with the values that ask for nothing."""


def check_keys(metadata: Mapping[str, object], architecture: str) -> None:
    """Refuse a key of the architecture that may change what is computed and is not read."""
    known = ARCHITECTURES[architecture]
    for name, value in metadata.items():
        prefix, _, key = name.partition(".")
        if prefix != architecture or known.honours(key) or key in IDLE or key in REPEATED:
            continue
        harmless = UNUSED.get(key, ())
        if not isinstance(value, list) and value in harmless:
            continue
        raise UnsupportedError(
            f"the GGUF key {name} has no implementation here",
            wanted=" or ".join(map(str, harmless)) or "only keys that are known",
            got=shown(value),
            do=_way_out(key, known),
        )


def _way_out(key: str, known: Architecture) -> str:
    names = chain(HONOURED, known.own, REPEATED, IDLE, UNUSED, [known.epsilon_key])
    close = None if key in UNUSED else nearest(key, list(names))
    typo = f"If {close} was meant, correct the key; otherwise l" if close else "L"
    return f"{typo}oad the model from a Hugging Face folder if its family is known"
