"""Tiny models of transformers with random weights, and ours with the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from everystep.models import Model, build_model
from everystep.models.loader import HeldWeights as Tensors
from tests.parity.models import EXACT

SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
T5_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
STACK_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 56,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
TEXT_SIZES: Mapping[str, Any] = {**STACK_SIZES, "max_position_embeddings": 40}
SOUND_SIZES: Mapping[str, Any] = {
    **STACK_SIZES,
    "num_mel_bins": 5,
    "max_source_positions": 16,
    "max_target_positions": 40,
    "begin_suppress_tokens": None,
}
MAMBA_SIZES: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "state_size": 5,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
}
DECODERS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "gpt_bigcode": (GPTBigCodeConfig, GPTBigCodeForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
    "falcon": (FalconConfig, FalconForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi": (PhiConfig, PhiForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
ENCODER_DECODERS: Mapping[str, tuple[Any, Any, Mapping[str, Any]]] = {
    "t5": (T5Config, T5ForConditionalGeneration, T5_SIZES),
    "mt5": (MT5Config, MT5ForConditionalGeneration, T5_SIZES),
    "bart": (BartConfig, BartForConditionalGeneration, TEXT_SIZES),
    "mbart": (MBartConfig, MBartForConditionalGeneration, TEXT_SIZES),
    "marian": (MarianConfig, MarianMTModel, TEXT_SIZES),
    "whisper": (WhisperConfig, WhisperForConditionalGeneration, SOUND_SIZES),
}
# What a family's own defaults would make large, or sizes would make impossible.
OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3": {"head_dim": 10},
    "smollm3": {"num_hidden_layers": 5, "pad_token_id": 0},
    "gemma2": {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 7},
    "gemma3_text": {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 7},
    "phi3": {"pad_token_id": 0},
    "gpt2": {"n_inner": 80},
    "gpt_bigcode": {"n_inner": 80},
    "opt": {"ffn_dim": 80, "pad_token_id": 0},
    "olmo2": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {
        "head_dim": 10,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "mlp_only_layers": [1],
    },
}


def reference_decoder(kind: str, dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """A model of transformers."""
    make_config, make_model = DECODERS[kind]
    sizes = {**SIZES, **OWN_SIZES.get(kind, {}), **config}
    # Other ways to attend leave caps of scores out, or round to float32.
    how = {"attn_implementation": EXACT} if "gemma" in kind else {}
    model = make_model(make_config(**sizes, **how)).to(dtype).eval()
    # Other ways to multiply by experts know no float64.
    model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            # As in a model that was loaded in this type, instead of rounded to float32 before.
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=dtype)
    return model


def with_norms(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose norms and biases have values of their own from now on."""
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    return model


def reference_pair(kind: str, dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """An encoder-decoder of transformers, whose norms and biases have values of their own."""
    make_config, make_model, sizes = ENCODER_DECODERS[kind]
    model = make_model(make_config(**{**sizes, **config})).to(dtype).eval()
    for name, weight in model.state_dict().items():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(weight, mean=weight.mean().item(), std=0.3)
    return model


def reference_t5(dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """A T5 of transformers as it is made: norms of ones."""
    model = T5ForConditionalGeneration(T5Config(**{**T5_SIZES, **config}))
    return model.to(dtype).eval()


def sounds(batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, channels, frames) what the encoder of a tiny Whisper hears."""
    size = SOUND_SIZES["num_mel_bins"], 2 * SOUND_SIZES["max_source_positions"]
    return torch.randn(batch, *size, dtype=dtype)


def reference_mamba(dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    """A model of recurrent layers of transformers, whose states reach far back."""
    model = MambaForCausalLM(MambaConfig(**{**MAMBA_SIZES, **config}))
    for block in model.backbone.layers:
        torch.nn.init.normal_(block.mixer.A_log)
        torch.nn.init.normal_(block.mixer.D)
        torch.nn.init.normal_(block.mixer.x_proj.weight, std=0.5)
    return model.to(dtype).eval()


def reference_logits(
    reference: PreTrainedModel, read: Tensor, mask: Tensor | None = None
) -> Tensor:
    """(B, T, V) without a cache, in the model's type: Mamba rounds what its head says."""
    with torch.no_grad():
        inner = reference.get_decoder()(read, attention_mask=mask, use_cache=False)
        return reference.lm_head(inner[0])


def ours(reference: PreTrainedModel, dtype: torch.dtype | None = None) -> Model:
    """Our model with the weights of transformers'."""
    source = Tensors(reference.state_dict())
    return build_model(reference.config.to_dict(), source, dtype=dtype or reference.dtype)


def ids(batch: int, length: int, vocabulary: int = 97) -> Tensor:
    """(B, T) random ids."""
    return torch.randint(2, vocabulary, (batch, length))


def farthest(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected number."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
