"""LoRA folders as PEFT writes them, with random values, and the weights that merging them gives."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PROJECTIONS = tuple(f"self_attn.{one}_proj" for one in "qkvo") + tuple(
    f"mlp.{one}_proj" for one in ("gate", "up", "down")
)
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": 3,
    "lora_alpha": 7,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "inference_mode": True,
}


def random_lora(
    weights: Mapping[str, Tensor], seed: int, projections: tuple[str, ...], rank: int = 3
) -> dict[str, Tensor]:
    """The tensors of an adapter for these projections of every layer, under PEFT's names.

    `weights`: those of the model, by their names in a checkpoint.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(projections):
            for part, shape in (("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank))):
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
                found[f"base_model.model.{module}.lora_{part}.weight"] = drawn * 0.3
    return found


def write_folder(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """The folder, with the adapter in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def merge(
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    weight: float = 1.0,
    alpha: float = 7,
    rslora: bool = False,
) -> None:
    """Adds the adapter to the model's weights, in place, as the papers define it."""
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            scale = alpha / (math.sqrt(len(a)) if rslora else len(a))
            module = name.removeprefix("base_model.model.").split(".lora_")[0]
            weights[f"{module}.weight"].add_(
                (b @ a).to(weights[f"{module}.weight"]), alpha=weight * scale
            )
