"""Small model folders for tests: a whole one, and safetensors files from their pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": [1, 2]}
TENSORS = {
    "embed.weight": torch.arange(6.0).view(2, 3),
    "norm.weight": torch.ones(3, dtype=torch.bfloat16),
    "ids": torch.tensor([1, 2]),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def write_json(path: Path, content: object) -> None:
    """Writes `content` as JSON, NaN and all."""
    path.write_text(json.dumps(content), encoding="utf-8")


def write_single(folder: Path, tensors: Mapping[str, Tensor] = TENSORS) -> Path:
    """A folder with a configuration and one file of weights."""
    write_json(folder / "config.json", CONFIG)
    save_file(dict(tensors), str(folder / "model.safetensors"))
    return folder


def write_sharded(folder: Path) -> Path:
    """A folder with a configuration, two files of weights and their index."""
    write_json(folder / "config.json", CONFIG)
    placed = {name: SHARDS[i % 2] for i, name in enumerate(TENSORS)}
    for shard in SHARDS:
        tensors = {name: TENSORS[name] for name, where in placed.items() if where == shard}
        save_file(tensors, str(folder / shard))
    write_json(folder / INDEX, {"metadata": {"total_size": 0}, "weight_map": placed})
    return folder


def safetensors_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header (JSON or bytes), and a length that may lie."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def described(dtype: str = "F32", shape: object = (1,), end: int = 4) -> dict[str, object]:
    """A tensor's description in a header, with its bytes at the start of the data."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
