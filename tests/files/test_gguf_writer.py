"""A written file says to every reader what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from everystep.errors import InvariantError
from everystep.files.gguf import read_gguf
from everystep.files.gguf_writer import BLOCKS, GgufEntry, write_gguf
from everystep.models.gguf_encoders import encode_rows

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 3,
    "llama.epsilon": 1e-5,
    "flag": True,
    "large": 1 << 40,
    "negative": -5,
    "tokens": ["a", "", "ü<|end|>"],
    "kinds": [1, 3, 6],
    "signed": [-1, 2],
    "scores": [0.5, -1.0],
    "flags": [True, False],
    "empty": [],
}


def written(path: Path) -> Path:
    values = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    tensors = {
        "norm.weight": ("F32", torch.arange(5.0).view(torch.uint8)),
        "a.weight": ("Q4_K", encode_rows(BLOCKS["Q4_K"], values)),
        "b.weight": ("Q8_0", encode_rows(BLOCKS["Q8_0"], values)),
    }
    shapes = {"norm.weight": (5,), "a.weight": (3, 256), "b.weight": (3, 256)}
    entries = [GgufEntry(name, shapes[name], BLOCKS[kind]) for name, (kind, _) in tensors.items()]
    with path.open("wb") as file:
        write_gguf(file, METADATA, entries, (raw for _, raw in tensors.values()))
    return path


def test_it_is_read_here(tmp_path: Path) -> None:
    found = read_gguf(written(tmp_path / "x.gguf"))
    expected = {**METADATA, "llama.epsilon": float(np.float32(1e-5))}
    assert found.metadata == expected
    assert {name: one.block.name for name, one in found.tensors.items()} == {
        "norm.weight": "F32",
        "a.weight": "Q4_K",
        "b.weight": "Q8_0",
    }
    assert found.dequantise("norm.weight").tolist() == [0, 1, 2, 3, 4]


def test_it_is_read_by_the_reader_of_ggml(tmp_path: Path) -> None:
    """Values too, which that reader decodes by its own code."""
    path = written(tmp_path / "x.gguf")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert theirs.fields["tokens"].contents() == METADATA["tokens"]
    assert theirs.fields["kinds"].contents() == METADATA["kinds"]
    assert theirs.fields["kinds"].types[-1] == gguf.GGUFValueType.INT32
    assert theirs.fields["llama.block_count"].types == [gguf.GGUFValueType.UINT32]
    for tensor in theirs.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = ours.dequantise(tensor.name).numpy()
        assert np.array_equal(values.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("value", [None, [1, "a"], {"a": 1}, [None], [[1]], 1.5j])
def test_values_without_a_type_are_refused(tmp_path: Path, value: Any) -> None:
    with (tmp_path / "x").open("wb") as file, pytest.raises(InvariantError, match="metadata"):
        write_gguf(file, {"key": value}, [], [])


def test_tensors_of_another_size_are_refused(tmp_path: Path) -> None:
    entry = GgufEntry("a", (2, 32), BLOCKS["Q8_0"])
    with (tmp_path / "x").open("wb") as file, pytest.raises(InvariantError, match="other bytes"):
        write_gguf(file, {}, [entry], [torch.zeros(67, dtype=torch.uint8)])
