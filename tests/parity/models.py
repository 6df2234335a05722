"""Tiny random models, the same weights in transformers and in this library, both in float64.

A family grows by adding its configurations to CATALOGUE. transformers' attention is replaced by
the same sums without its step down to float32, which would hide small errors of ours; it goes
through transformers' own interface for attention functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from everystep.api.load import from_weights
from everystep.config import GenerationConfig
from everystep.nn.experts import Experts
from everystep.nn.norm import Norm
from tests.parity.sizes import BASE, STACKS, T5

EXACT = "exact"
ROOTS = (
    *(LlamaRMSNorm, MixtralRMSNorm, Olmo2RMSNorm, Phi3RMSNorm, Qwen2RMSNorm),
    *(Qwen3MoeRMSNorm, Qwen3RMSNorm, SmolLM3RMSNorm),
    T5LayerNorm,
)


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of transformers' eager kind, with the softmax in the type of the model."""
    shared = getattr(module, "num_key_value_groups", 1)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    weights = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = (weights / softcap).tanh() * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = weights.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


transformers.AttentionInterface.register(EXACT, exact_attention)
transformers.AttentionMaskInterface.register(EXACT, eager_mask)


def narrow_guidance() -> None:
    """Lets transformers' guidance read both sets of logits in float32, as it does one of them."""
    kind = transformers.UnbatchedClassifierFreeGuidanceLogitsProcessor
    wide = kind.get_unconditional_logits
    kind.get_unconditional_logits = lambda self, input_ids: wide(self, input_ids).float()


narrow_guidance()


@contextmanager
def exact_norms() -> Iterator[None]:
    """Root mean square norms and routers of both sides do not step down to float32."""

    def theirs(norm: Any, x: Tensor) -> Tensor:
        return norm.weight * F.rms_norm(x, x.shape[-1:], eps=norm.variance_epsilon)

    def one_more(norm: Any, x: Tensor) -> Tensor:
        return (1 + norm.weight) * F.rms_norm(x, x.shape[-1:], eps=norm.eps)

    def their_choice(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
        shares, numbers = logits.softmax(-1).topk(router.top_k, dim=-1)
        # Mixtral's router always does.
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        return logits, shares, numbers

    def own_choice(
        experts: Experts, x: Tensor, chosen: int, *, normalised: bool
    ) -> tuple[Tensor, Tensor]:
        shares, numbers = experts.router(x).softmax(-1).topk(chosen, dim=-1)
        return shares / shares.sum(-1, keepdim=True) if normalised else shares, numbers

    rounding = Norm.__call__

    def own(norm: Any, x: Tensor) -> Tensor:
        if norm.kind == "layer":
            return rounding(norm, x)
        scale = 1 + norm.weight if norm.plus_one else norm.weight
        return scale * F.rms_norm(x, x.shape[-1:], eps=norm.eps)

    with pytest.MonkeyPatch.context() as patch:
        for kind in ROOTS:
            patch.setattr(kind, "forward", theirs)
        patch.setattr(Gemma2RMSNorm, "forward", one_more)
        patch.setattr(Gemma3RMSNorm, "forward", one_more)
        patch.setattr(Norm, "__call__", own)
        for router in (MixtralTopKRouter, Qwen3MoeTopKRouter):
            patch.setattr(router, "forward", their_choice)
        patch.setattr(Experts, "choose", own_choice)
        yield


_TABLES = {
    "t5": "shared.weight",
    "gpt2": "transformer.wte.weight",
    "gpt_bigcode": "transformer.wte.weight",
    "opt": "model.decoder.embed_tokens.weight",
    "gpt_neox": "gpt_neox.embed_in.weight",
    "falcon": "transformer.word_embeddings.weight",
}


@dataclass(frozen=True)
class Tiny:
    """A configuration as config.json holds it. `alone`: its results depend on the other rows of a
    batch in transformers, so draws for it have prompts of one length and no speculation."""

    name: str
    config: Mapping[str, Any]
    alone: bool = False
    spread: float = 2.5

    @property
    def vocabulary(self) -> int:
        """The width of its logits."""
        return int(self.config["vocab_size"])

    @property
    def encodes(self) -> bool:
        """Whether an encoder reads the prompts."""
        return self.config["model_type"] in ("t5", *PLACED)

    @property
    def placed(self) -> bool:
        """Whether an encoder counts the padding before a prompt."""
        return self.config["model_type"] in PLACED

    @property
    def context(self) -> int | None:
        """The longest sequence it was made for."""
        return self.config.get("max_position_embeddings")

    @property
    def table(self) -> str:
        """The name of the embeddings."""
        if self.placed:
            return "model.shared.weight"
        return _TABLES.get(self.config["model_type"], "model.embed_tokens.weight")


@dataclass(frozen=True, eq=False)
class Pair:
    """A tiny model in transformers, and its weights under their checkpoint names."""

    tiny: Tiny
    reference: Any
    weights: Mapping[str, Tensor] = field(repr=False)


PLACED = ("bart", "marian", "mbart")
"""Families whose encoder reads a vector for each place of the rectangle, padding included."""


def _llama(name: str, vocabulary: int, alone: bool = False, **changes: Any) -> Tiny:
    config = {**BASE, "model_type": "llama", "vocab_size": vocabulary, **changes}
    return Tiny(f"llama-{name}", config, alone)


def _qwen2(name: str, vocabulary: int, **changes: Any) -> Tiny:
    return Tiny(
        f"qwen2-{name}", {**BASE, "model_type": "qwen2", "vocab_size": vocabulary, **changes}
    )


def _t5(name: str, vocabulary: int, **changes: Any) -> Tiny:
    return Tiny(f"t5-{name}", {**T5, "vocab_size": vocabulary, **changes})


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 12,
}

CATALOGUE: Mapping[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        _llama("plain", 40, num_key_value_heads=4, rope_theta=10000.0),
        _llama("grouped-tied", 24, tie_word_embeddings=True),
        _llama("one-kv-head", 31, num_key_value_heads=1, num_hidden_layers=1),
        _llama("biases", 60, attention_bias=True, mlp_bias=True),
        _llama("wide-heads", 33, head_dim=12, rms_norm_eps=1e-5),
        _llama("linear", 37, rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 3.0}),
        _llama(
            "yarn",
            45,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        _llama("llama3", 52, rope_theta=500000.0, rope_scaling=_LLAMA3),
        _llama(
            "dynamic",
            41,
            alone=True,
            max_position_embeddings=14,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        ),
        _llama("longrope", 29, alone=True, rope_parameters=_LONGROPE),
        _qwen2("grouped", 48),
        _qwen2("tied", 26, tie_word_embeddings=True, num_key_value_heads=1),
        _qwen2("window", 35, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        _t5("plain", 44),
        _t5("gated", 36, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        _t5("one-layer", 27, num_layers=1, num_heads=2),
    )
}


_GEMMA = {
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _decoder(kind: str, vocabulary: int, **changes: Any) -> Tiny:
    return Tiny(kind, {**BASE, "model_type": kind, "vocab_size": vocabulary, **changes})


def _placed(kind: str, vocabulary: int, **changes: Any) -> Tiny:
    return Tiny(kind, {**STACKS, "model_type": kind, "vocab_size": vocabulary, **changes})


FURTHER: Mapping[str, Tiny] = {
    tiny.name: tiny
    for tiny in (
        _decoder("mistral", 38, sliding_window=6),
        _decoder("qwen3", 43, head_dim=10),
        _decoder("smollm3", 34, num_hidden_layers=4, tie_word_embeddings=True),
        _decoder("gemma2", 39, **_GEMMA, final_logit_softcapping=9.0, attn_logit_softcapping=4.0),
        _decoder("gemma3_text", 47, **_GEMMA, num_hidden_layers=3, sliding_window_pattern=3),
        _decoder("phi3", 32, sliding_window=9),
        _decoder("mixtral", 42, num_local_experts=5, num_experts_per_tok=2),
        _decoder(
            "qwen3_moe",
            37,
            head_dim=10,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            mlp_only_layers=[1],
            num_hidden_layers=3,
        ),
        _decoder("starcoder2", 36, norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh"),
        _decoder("gpt2", 41, n_inner=48, tie_word_embeddings=True),
        _decoder("opt", 37, ffn_dim=48),
        _decoder("gpt_neox", 35, hidden_act="gelu", rotary_pct=0.5),
        _decoder("falcon", 42),
        _decoder("olmo2", 33),
        _decoder("gpt_bigcode", 36, n_inner=48),
        _decoder("phi", 40, hidden_act="gelu_new"),
        _decoder("stablelm", 31, use_parallel_residual=True, partial_rotary_factor=0.5),
        _placed("bart", 42),
        _placed("marian", 46, scale_embedding=True, decoder_start_token_id=0),
        _placed("mbart", 28, tie_word_embeddings=False),
    )
}
"""Families that are drawn by their names."""
TINIES = {**CATALOGUE, **FURTHER}


@cache
def pair(name: str) -> Pair:
    """The model of a name; its weights depend on the name alone."""
    tiny = TINIES[name]
    known = transformers.CONFIG_MAPPING[tiny.config["model_type"]]
    # transformers' eager attention steps down to float32 in most decoders, and in them alone.
    attention = "eager" if tiny.encodes or "falcon" in tiny.name else EXACT
    config = known.from_dict(dict(tiny.config), attn_implementation=attention)
    auto = transformers.AutoModelForSeq2SeqLM if tiny.encodes else transformers.AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = auto.from_config(config, dtype=torch.float64)
    reference.generation_config = transformers.GenerationConfig()
    # The others multiply no float64.
    reference.set_experts_implementation("eager")
    _randomise(reference, tiny)
    return Pair(tiny, reference.eval(), reference.state_dict())


def fresh_reference(name: str) -> Any:
    """transformers' model with what earlier calls left undone: in its rotary tables, and of the
    room that their static caches had."""
    model = pair(name).reference
    vars(model).pop("_previous_max_cache_length", None)
    body = model.base_model
    if hasattr(body, "rotary_emb"):
        body.rotary_emb = type(body.rotary_emb)(model.config)
    return model


@cache
def subject(name: str) -> Any:
    """This library's model with the same weights."""
    known = pair(name)
    config, settings = dict(known.tiny.config), GenerationConfig()
    return from_weights(config, known.weights, dtype=torch.float64, generation_config=settings)


@torch.no_grad()
def _randomise(model: Any, tiny: Tiny) -> None:
    """Weights of unit gain, and a head whose logits have the standard deviation `spread`."""
    generator = torch.Generator().manual_seed(sum(map(ord, tiny.name)))
    head = model.get_output_embeddings().weight
    tied = tiny.encodes and tiny.config.get("tie_word_embeddings", True)
    for name, weight in model.named_buffers():
        if name == "final_logits_bias":
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.copy_(0.1 * noise)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        if weight is head:
            weight.copy_(noise * tiny.spread / math.sqrt(weight.shape[1]))
        elif name == "decoder.final_layer_norm.weight" and tied:
            # A tied T5 divides by this root, and small embeddings keep it from repeating tokens.
            weight.copy_(math.sqrt(weight.shape[0]) * (1 + 0.2 * noise))
        elif tiny.placed and name.endswith(("fc2.weight", "self_attn.out_proj.weight")):
            weight.copy_(0.05 * noise)  # norms come after, and would leave little of the token
        elif tiny.encodes and name.endswith("positions.weight"):
            weight.copy_(0.1 * noise)
        elif tiny.encodes and name.endswith(("shared.weight", "embed_tokens.weight")):
            weight.copy_(noise)
        elif name.endswith(("EncDecAttention.o.weight", "encoder_attn.out_proj.weight")):
            weight.copy_(0.1 * noise)  # the encoder must not drown what the decoder said last
        elif weight.dim() == 1:
            weight.copy_(weight.mean() + 0.2 * noise)
        else:
            inputs = weight.shape[0 if "gpt2" in tiny.name and ".h." in name else -1]
            weight.copy_(noise / math.sqrt(inputs / 2))
