"""The configuration of a tiny Qwen3-VL: what stands for images, and how large its two parts are."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen3_vl import Qwen3VLConfig

IMAGE, START, PAD = 50, 51, 1
PATCH = 3 * 2 * 4 * 4
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": PAD,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def configured() -> Any:
    """A fresh one."""
    special = {
        "image_token_id": IMAGE,
        "vision_start_token_id": START,
        "vision_end_token_id": 52,
        "video_token_id": 53,
    }
    return Qwen3VLConfig(text_config=dict(TEXT), vision_config=dict(VISION), **special)
