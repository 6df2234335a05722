"""Qwen2-VL and Qwen2.5-VL: the decoder of Qwen2, whose heads turn by time, row and column one after
another, and a vision tower. That of Qwen2.5 looks at windows in most of its blocks, and its videos
know how long they last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from everystep.models.config import Fields
from everystep.models.decoders.decoder_families import gated_decoder
from everystep.models.decoders.picture_decoders import (
    TOWER_NAMES,
    block_numbers,
    mrope_of,
    part_of,
    text_family,
    text_part,
    vision_common,
    vision_family,
)
from everystep.models.decoders.qwen import windowed_layers
from everystep.models.spec import DecoderSpec
from everystep.models.vision.spec import VisionSpec
from everystep.nn.activations import ACTIVATIONS

_TEXT: Mapping[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
}
_VISION: Mapping[str, Any] = {
    "depth": 32,
    "num_heads": 16,
    "hidden_size": 3584,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_OF_2: Mapping[str, Any] = {"embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4}
_OF_2_5: Mapping[str, Any] = {
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_NAMES: Mapping[str, str] = {
    **TOWER_NAMES,
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "taps": "",
    "merger_norm": "ln_q",
    "merger_up": "mlp.0",
    "merger_down": "mlp.2",
}
_GATED_NAMES: Mapping[str, str] = {
    **_NAMES,
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def _qwen2_vl(config: Mapping[str, Any]) -> DecoderSpec:
    outer = Fields(config)
    spec = _text(text_part(outer, _TEXT))
    read = Fields(part_of(outer, "vision_config", {**_VISION, **_OF_2}), _WHERE)
    size = read.integer("embed_dim")
    vision = VisionSpec(
        **vision_common(outer, read, spec.width, size, "hidden_size"),
        inner=int(size * read.number("mlp_ratio")),
        activation=read.choice("hidden_act", ACTIVATIONS),
        patch_bias=False,
        frames_apart=False,
    )
    return replace(spec, vision=vision)


def _qwen2_5_vl(config: Mapping[str, Any]) -> DecoderSpec:
    outer = Fields(config)
    spec = _text(text_part(outer, _TEXT))
    read = Fields(part_of(outer, "vision_config", {**_VISION, **_OF_2_5}), _WHERE)
    size, features = read.integer("hidden_size"), "out_hidden_size"
    common = vision_common(outer, read, spec.width, size, features)
    pixels = common["patch"] * common["merge"]
    window = read.integer("window_size") // pixels
    if not window:
        raise read.wrong("window_size", f"at least {pixels} pixels", read.integer("window_size"))
    vision = VisionSpec(
        **common,
        inner=read.integer("intermediate_size"),
        activation=read.choice("hidden_act", ACTIVATIONS),
        norm="rms",
        gated=True,
        patch_bias=False,
        window=window,
        whole=block_numbers(read, "fullatt_block_indexes"),
        time_step=read.number("tokens_per_second"),
        frames_apart=False,
    )
    return replace(spec, vision=vision)


_WHERE = "config.json, vision_config"


def _text_alone(config: Mapping[str, Any]) -> DecoderSpec:
    return _text(Fields(config))


def _text(read: Fields) -> DecoderSpec:
    rope = mrope_of(read, [16, 24, 24], 1_000_000.0, interleaved=False)
    return gated_decoder(read, windowed_layers(read, rope), qkv_bias=True)


FAMILIES = {
    "qwen2_vl": vision_family(_qwen2_vl, _NAMES),
    "qwen2_vl_text": text_family(_text_alone, _TEXT),
    "qwen2_5_vl": vision_family(_qwen2_5_vl, _GATED_NAMES),
    "qwen2_5_vl_text": text_family(_text_alone, _TEXT),
}
