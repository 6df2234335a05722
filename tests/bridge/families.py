"""Tiny random models of transformers in float64, one of each family, and random calls."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY, PAD, END = 40, 1, 3
_DECODER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TWO_SIDES: Mapping[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
"""The sizes of an encoder and of the decoder beside it."""
_SEQ2SEQ: Mapping[str, Any] = {
    **TWO_SIDES,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """`changes`: what its configuration says. `alone`: in float64 transformers' eager attention
    gives nan where a row is padded, so its batches have prompts of one length."""

    changes: Mapping[str, Any]
    alone: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(_DECODER),
    "gemma2": Family(
        {**_DECODER, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}, alone=True
    ),
    "phi3": Family(_DECODER),
    "gpt_neox": Family(_DECODER),
    "opt": Family({**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family({"hidden_size": 32, "n_layer": 2, "n_head": 4}, alone=True),
    "mistral": Family({**_DECODER, "sliding_window": 6}),
    "qwen3_moe": Family(
        {**_DECODER, **_EXPERTS, "head_dim": 8}, options={"experts_implementation": "eager"}
    ),
    "mamba": Family({"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "falcon": Family(_DECODER),
    "gpt2": Family({"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "starcoder2": Family({**_DECODER, "sliding_window": None}),
    "t5": Family(
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        }
    ),
    "bart": Family(_SEQ2SEQ),
    "marian": Family({**_SEQ2SEQ, "decoder_vocab_size": VOCABULARY}),
    "pegasus": Family(_SEQ2SEQ),
}


@cache
def model_of(name: str) -> Any:
    """The model of a family; its weights depend on the name alone."""
    family = FAMILIES[name]
    values = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END}
    kind = transformers.CONFIG_MAPPING[name]
    config = kind(**{**values, "bos_token_id": None, **family.changes}, **family.options)
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float64).eval()
        randomise(model)
    return model


@torch.no_grad()
def randomise(model: Any) -> None:
    """Weights large enough that the tokens of a greedy run differ."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.copy_(torch.randn_like(weight) * (1.5 / weight.shape[-1] ** 0.5))


class Nudge:
    """A caller's own processor: what it adds depends on the last id."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        places = torch.arange(scores.shape[1])
        return scores + 0.5 * ((places + input_ids[:, -1:]) % 3 == 0)


def prompts(draw: random.Random, name: str) -> dict[str, Tensor]:
    """Ids and their mask: padded on the left, where an encoder reads them on the right."""
    family, encodes = FAMILIES[name], model_of(name).config.is_encoder_decoder
    rows, longest = draw.randint(1, 3), draw.randint(1, 8)
    lengths = [longest if family.alone else draw.randint(1, longest) for _ in range(rows)]
    width = max(lengths)
    ids = torch.full((rows, width), PAD)
    for row, length in enumerate(lengths):
        own = torch.tensor([draw.randint(4, VOCABULARY - 1) for _ in range(length)])
        ids[row, slice(None, length) if encodes else slice(width - length, None)] = own
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def settings(draw: random.Random, name: str) -> dict[str, Any]:
    """The keywords of a call, beside its prompts."""
    found: dict[str, Any] = {"max_new_tokens": draw.randint(1, 12)}
    sampled, width = draw.random() < 0.5, draw.choice([1, 1, 2, 4])
    found |= {"do_sample": sampled, "num_beams": width}
    if sampled:
        found |= {"top_k": draw.choice([0, 5, 20]), "temperature": draw.choice([0.7, 1.0, 1.5])}
        found["top_p"] = draw.choice([1.0, 0.8])
    if width > 1:
        found["length_penalty"] = draw.choice([0.0, 1.0, 2.0])
        found["early_stopping"] = draw.choice([False, True, "never"])
    if sampled or width > 1:
        found["num_return_sequences"] = draw.randint(1, width if width > 1 else 3)
    optional = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [8, 9]],
        "min_new_tokens": min(4, found["max_new_tokens"]),
        "sequence_bias": {(5,): 1.5, (6, 7): -2.0},
        "suppress_tokens": [10, 11],
    }
    found |= {key: value for key, value in optional.items() if draw.random() < 0.15}
    config = model_of(name).config
    if name != "mamba" and not config.is_encoder_decoder and draw.random() < 0.2:
        found["prefill_chunk_size"] = draw.randint(1, 4)
    if draw.random() < 0.2:
        found["logits_processor"] = [Nudge()]
    return found
