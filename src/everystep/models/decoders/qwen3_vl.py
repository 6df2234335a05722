"""Qwen3-VL: the decoder of Qwen3 or of Qwen3-MoE, whose heads turn by time, row and column, and a
vision tower, three of whose blocks add to what the decoder's first layers say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import gated_decoder
from everystep.models.decoders.mixtures import experts_of, sparse_layers
from everystep.models.decoders.picture_decoders import (
    TOWER_NAMES,
    block_numbers,
    mrope_of,
    mrope_values,
    part_of,
    text_family,
    text_part,
    vision_common,
    vision_family,
)
from everystep.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from everystep.models.vision.spec import VisionSpec
from everystep.nn.activations import ACTIVATIONS

_TEXT: Mapping[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
}
_MIXTURE: Mapping[str, Any] = {
    **_TEXT,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": None,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "decoder_sparse_step": 1,
}
_VISION: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_NAMES: Mapping[str, str] = {
    **TOWER_NAMES,
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
    "taps": "model.visual.deepstack_merger_list",
    "merger_norm": "norm",
    "merger_up": "linear_fc1",
    "merger_down": "linear_fc2",
}


def _qwen3_vl(config: Mapping[str, Any]) -> DecoderSpec:
    outer = Fields(config)
    return _with_tower(outer, _dense(text_part(outer, _TEXT)))


def _qwen3_vl_moe(config: Mapping[str, Any]) -> DecoderSpec:
    outer = Fields(config)
    return _with_tower(outer, _mixture(text_part(outer, _MIXTURE)))


def _qwen3_vl_text(config: Mapping[str, Any]) -> DecoderSpec:
    return _alone(_dense, Fields(config))


def _qwen3_vl_moe_text(config: Mapping[str, Any]) -> DecoderSpec:
    return _alone(_mixture, Fields(config))


def _dense(read: Fields) -> DecoderSpec:
    return _text(read, [None] * read.count("num_hidden_layers"))


def _mixture(read: Fields) -> DecoderSpec:
    """Read a mixture, where shares always add up to 1."""
    size = read.integer("moe_intermediate_size")
    experts = experts_of(read, 60, size, normalised=True)
    return _text(read, [experts if one else None for one in sparse_layers(read)])


def _alone(text: Callable[[Fields], DecoderSpec], read: Fields) -> DecoderSpec:
    spec, deep = text(read), read.integer("n_deepstack_layers", 0, least=0)
    if deep > len(spec.layers):
        raise read.wrong("n_deepstack_layers", f"at most {len(spec.layers)}", deep)
    return replace(spec, deepstack=deep)


def _with_tower(outer: Fields, spec: DecoderSpec) -> DecoderSpec:
    vision = _vision(outer, spec.width)
    if len(vision.taps) > len(spec.layers):
        raise outer.wrong("deepstack_visual_indexes", f"at most {len(spec.layers)}", vision.taps)
    return replace(spec, deepstack=len(vision.taps), vision=vision)


def _text(read: Fields, experts: Sequence[ExpertsSpec | None]) -> DecoderSpec:
    """Read the text of either kind.

    `experts`: those of each layer, None where it has an MLP.
    """
    _, turns = mrope_values(read)
    if not turns.flag("mrope_interleaved", True):
        raise UnsupportedError(
            f"{turns.where}: mrope_interleaved is false",
            wanted="true, which is what transformers computes whatever it says",
            do="Remove it",
        )
    rope = mrope_of(read, [24, 20, 20], 500_000.0, interleaved=True)
    bias = read.flag("attention_bias", False)
    layers = [LayerSpec(rope, experts=one) for one in experts]
    return gated_decoder(read, layers, qkv_bias=bias, out_bias=bias, qk_norm="heads")


def _vision(outer: Fields, width: int) -> VisionSpec:
    read = Fields(part_of(outer, "vision_config", _VISION), "config.json, vision_config")
    entries = read.integer("num_position_embeddings")
    if math.isqrt(entries) ** 2 != entries:
        raise read.wrong("num_position_embeddings", "a square number", entries)
    size = read.integer("hidden_size")
    return VisionSpec(
        **vision_common(outer, read, width, size, "out_hidden_size"),
        inner=read.integer("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS),
        side=math.isqrt(entries),
        taps=block_numbers(read, "deepstack_visual_indexes"),
    )


FAMILIES = {
    "qwen3_vl": vision_family(_qwen3_vl, _NAMES),
    "qwen3_vl_text": text_family(_qwen3_vl_text, _TEXT),
    "qwen3_vl_moe": vision_family(_qwen3_vl_moe, _NAMES, stacked=True),
    "qwen3_vl_moe_text": text_family(_qwen3_vl_moe_text, _MIXTURE, stacked=True),
}
