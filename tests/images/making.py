"""Folders of tiny models that read pictures, with a tokenizer and images drawn on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken

from everystep.images.tokenizer import END, IMAGE_PAD, START, VIDEO_PAD
from everystep.testing.models import tiny_vision
from everystep.testing.tokenizer import tiny_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
    "do_convert_rgb": True,
}
VIDEO_SETTINGS = {**SETTINGS, "size": {"shortest_edge": 128, "longest_edge": 2048}}


def write_tokenizer(folder: Path) -> dict[str, int]:
    """A tokenizer with the tokens of pictures; returns their ids."""
    tokenizer = tiny_tokenizer()
    tokens = (IMAGE_PAD, VIDEO_PAD, START, END)
    tokenizer.backend.add_tokens([AddedToken(one, special=True) for one in tokens])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return {one: tokenizer.backend.token_to_id(one) for one in tokens}


def write_folder(folder: Path, **settings: Any) -> Path:
    """A model, its tokenizer and how its pictures are prepared."""
    folder.mkdir(exist_ok=True)
    ids = write_tokenizer(folder)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    base = tiny_vision().config
    text = {**base.text_config, "vocab_size": 324, "intermediate_size": 64}
    tokens = dict(zip(names, ids.values(), strict=True))
    model = tiny_vision(dtype=torch.float32, text_config=text, **tokens)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    config = {**model.config.to_dict(), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_SETTINGS))
    return folder


def drawn(height: int, width: int, seed: int = 0) -> Image.Image:
    """An image with edges and slopes in it."""
    rows, columns = np.mgrid[:height, :width]
    shades = np.stack([rows * 255 // height, columns * 255 // width, (rows * columns + seed) % 256])
    return Image.fromarray(shades.transpose(1, 2, 0).astype(np.uint8))
