"""Tiny models of transformers that read pictures, prompts for them, and ours beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

import everystep as es
from everystep.models import Model, build_model
from everystep.models.loader import HeldWeights

IMAGE, VIDEO, START, END = 90, 91, 92, 93
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
TEXT: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
VISION: Mapping[str, Any] = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_THIRD = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
OWN: Mapping[str, tuple[Any, Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {"head_dim": 32},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 5e6},
        _THIRD,
    ),
    "qwen3_vl_moe": (
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
        {"head_dim": 32, **_EXPERTS},
        {"mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 5e6},
        _THIRD,
    ),
    "qwen2_vl": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {},
        {"mrope_section": [2, 3, 3], "rope_theta": 1e4},
        {"hidden_size": 64, "embed_dim": 32, "mlp_ratio": 3},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {},
        {"mrope_section": [2, 3, 3], "rope_theta": 1e4},
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    ),
}
"""By family the classes, and what its text, its rope and its tower have beside the others."""
GREEDY: Mapping[str, Any] = {
    "max_new_tokens": 8,
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    # transformers takes a placeholder that it generates for one of the prompt.
    "suppress_tokens": [*TOKENS.values()],
}


def reference_of(
    kind: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    vision: Mapping[str, Any] = MappingProxyType({}),
    **text: Any,
) -> PreTrainedModel:
    """A model of transformers, whose norms and biases are random too."""
    torch.manual_seed(seed)
    make_config, make_model, own_text, rope, own_vision = OWN[kind]
    rope = {"rope_type": "default", **rope}
    config = make_config(
        text_config={**TEXT, **own_text, "rope_parameters": rope, **text},
        vision_config={**VISION, **own_vision, **vision},
        **TOKENS,
    )
    model: PreTrainedModel = make_model(config).to(dtype).eval()
    # Other ways to multiply by experts know no float64.
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_q" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


def ours_of(reference: PreTrainedModel, **how: Any) -> Model:
    """Ours with the same weights."""
    weights = HeldWeights(reference.state_dict())
    return build_model(reference.config.to_dict(), weights, **{"dtype": reference.dtype, **how})


@dataclass(frozen=True)
class Shown:
    """A picture of a prompt by its grid."""

    grid: tuple[int, int, int]
    video: bool = False

    @property
    def size(self) -> int:
        """How many patches it has."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    def ids(self, apart: bool = True) -> list[int]:
        """Its placeholders and what stands around them."""
        frames, token = (self.grid[0] if apart else 1), VIDEO if self.video else IMAGE
        count = self.size // 4 // frames
        one = [START, *[token] * count, END]
        return [id for frame in range(frames) for id in ([7] if self.video and apart else []) + one]


Part = int | Shown
SMALL, WIDE, SQUARE = Shown((1, 4, 6)), Shown((1, 4, 8)), Shown((1, 4, 4))
FILM = Shown((3, 4, 4), video=True)


def prompt_of(
    rows: Sequence[Sequence[Part]],
    *,
    apart: bool = True,
    patch: int = 96,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """What a processor would return for rows of ids and pictures, padded on the left."""
    lists = [
        [id for part in row for id in (part.ids(apart) if isinstance(part, Shown) else [part])]
        for row in rows
    ]
    width = max(map(len, lists))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for line, own in zip(ids, lists, strict=True):
        line[width - len(own) :] = torch.tensor(own)
    found = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "mm_token_type_ids": ((ids == IMAGE) * 1 + (ids == VIDEO) * 2).int(),
    }
    for video, pixels, grids in (
        (False, "pixel_values", "image_grid_thw"),
        (True, "pixel_values_videos", "video_grid_thw"),
    ):
        own = [p for row in rows for p in row if isinstance(p, Shown) and p.video == video]
        if own:
            found[pixels] = torch.randn(sum(one.size for one in own), patch).to(dtype)
            found[grids] = torch.tensor([one.grid for one in own])
    return found


def model_of(reference: PreTrainedModel, executor: Any = "auto", **how: Any) -> es.LanguageModel:
    """Ours with its face."""
    return es.LanguageModel(ours_of(reference, **how), executor=executor)


ROWS: Mapping[str, list[list[Part]]] = {
    "text": [[5, 6, 7, 8, 9]],
    "an image": [[5, 6, SMALL, 8, 9]],
    "two images": [[5, SMALL, 6, WIDE, 8, 9]],
    "a video": [[5, FILM, 8, 9]],
    "an image and a video": [[5, FILM, 6, SQUARE, 8]],
    "ragged rows": [[5, SMALL, 6, WIDE, 8], [9, 10, 11], [12, SQUARE, 13], [FILM, 14]],
}
