"""Mixtures of experts: Mixtral, and Qwen3-MoE, some of whose layers may have an MLP instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import (
    decoder_family,
    gated_decoder,
    rope_of,
    window_of,
)
from everystep.models.parameters import NAMES
from everystep.models.spec import DecoderSpec, ExpertsSpec, LayerSpec

_MIXTRAL = {
    **NAMES,
    "router": "block_sparse_moe.gate",
    "router_there": "mlp.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
}


def _mixtral(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Mixtral, where shares always add up to 1."""
    read = Fields(config)
    experts = experts_of(read, 8, read.integer("intermediate_size"), normalised=True)
    layer = LayerSpec(rope_of(read, theta=1_000_000.0), window_of(read), experts=experts)
    return gated_decoder(read, [layer] * read.count("num_hidden_layers"))


def _qwen3_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Read a Qwen3 mixture, where all layers have the window."""
    read = Fields(config)
    rope = rope_of(read)
    window = window_of(read) if read.flag("use_sliding_window") else None
    normalised = read.flag("norm_topk_prob")
    experts = experts_of(read, 128, read.integer("moe_intermediate_size"), normalised=normalised)
    layers = [
        LayerSpec(rope, window, experts=experts if one else None) for one in sparse_layers(read)
    ]
    bias = read.flag("attention_bias", False)
    return gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, qk_norm="heads")


def experts_of(read: Fields, usual: int, size: int, *, normalised: bool) -> ExpertsSpec:
    """Return experts of this size.

    Their number stands under either of two keys, or is the `usual` one.
    """
    count, other = (read.values.get(key) for key in ("num_local_experts", "num_experts"))
    if None not in (count, other) and count != other:
        raise read.wrong("num_experts", f"num_local_experts = {count}, or none", other)
    key = "num_experts" if count is None else "num_local_experts"
    found, chosen = read.count(key, usual), read.integer("num_experts_per_tok")
    if chosen > found:
        raise read.wrong("num_experts_per_tok", f"at most {found}, the number of experts", chosen)
    return ExpertsSpec(found, chosen, size, normalised)


def sparse_layers(read: Fields) -> list[bool]:
    """Return which layers have experts: every n-th, but for those in `mlp_only_layers`."""
    every, without = read.integer("decoder_sparse_step"), read.values.get("mlp_only_layers") or []
    if not isinstance(without, list) or any(type(one) is not int or one < 0 for one in without):
        raise read.wrong("mlp_only_layers", "numbers of layers", without)
    count = read.count("num_hidden_layers")
    return [(index + 1) % every == 0 and index not in without for index in range(count)]


FAMILIES = {
    "mixtral": decoder_family(
        _mixtral,
        _MIXTRAL,
        vocab_size=32000,
        intermediate_size=14336,
        num_key_value_heads=8,
        num_experts_per_tok=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
    ),
    "qwen3_moe": decoder_family(
        _qwen3_moe,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        norm_topk_prob=False,
        max_position_embeddings=32768,
        use_sliding_window=False,
        sliding_window=4096,
    ),
}
