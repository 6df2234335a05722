"""What a whole GGUF file gives: metadata, blocks and values."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import pytest
import torch

from everystep.errors import FormatError, UnsupportedError
from everystep.files.gguf import GgufFile, read_gguf
from tests.files import gguf_writer as gguf

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 0.5,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": ["a", "é", "世"],
    "tokenizer.ggml.scores": [0.5, -1.0],
    "tokenizer.ggml.flags": [True, False],
    "nested": [[1, 2], [3]],
    "negative": -7,
    "nothing": [],
}
KINDS = list(gguf.TYPE_CODES)


@pytest.fixture
def opened(tmp_path: Path) -> GgufFile:
    tensors = {kind: (kind, torch.randn(3, 256)) for kind in KINDS}
    return read_gguf(gguf.write_gguf(tmp_path / "m.gguf", METADATA, tensors))


def test_metadata_comes_back_as_it_was_written(opened: GgufFile) -> None:
    assert opened.metadata == METADATA
    assert {key: type(value) for key, value in opened.metadata.items()} == {
        key: type(value) for key, value in METADATA.items()
    }


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path: Path, version: int) -> None:
    path = gguf.write_gguf(tmp_path / "m.gguf", METADATA, {}, version)
    assert read_gguf(path).metadata == METADATA


def test_a_file_without_anything_is_read(tmp_path: Path) -> None:
    opened = read_gguf(gguf.write_gguf(tmp_path / "m.gguf", {}, {}))
    assert (opened.metadata, opened.tensors) == ({}, {})


def test_shapes_are_in_the_order_of_torch(tmp_path: Path) -> None:
    tensors = {"t": ("F32", torch.zeros(2, 3, 4))}
    opened = read_gguf(gguf.write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert opened.tensors["t"].shape == (2, 3, 4)


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_another_alignment_is_followed(tmp_path: Path, alignment: int) -> None:
    values = {"a": torch.randn(3), "b": torch.randn(5)}
    tensors = {name: ("F32", value) for name, value in values.items()}
    path = gguf.write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors)
    opened = read_gguf(path)
    assert all(torch.equal(opened.dequantise(name), values[name]) for name in values)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_the_stored_bytes_by_row(opened: GgufFile, kind: str) -> None:
    tensor = opened.tensors[kind]
    stored = opened.path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    blocks = opened.blocks(kind)
    assert blocks.shape == (3, gguf.block_bytes(kind, (256,)))
    assert bytes(blocks.flatten().tolist()) == stored


def test_blocks_are_not_copied(opened: GgufFile) -> None:
    start = opened.data.data_ptr()
    assert opened.blocks("Q4_1").data_ptr() == start + opened.tensors["Q4_1"].offset


def test_writing_into_blocks_does_not_reach_the_file(opened: GgufFile) -> None:
    before = opened.path.read_bytes()
    opened.blocks("Q8_0").fill_(255)
    assert opened.path.read_bytes() == before


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no madvise on this system")
def test_a_released_tensor_is_read_from_the_file_again(opened: GgufFile) -> None:
    before = opened.blocks("Q8_0").clone()
    opened.blocks("Q8_0").fill_(255)
    opened.release("Q8_0")
    assert torch.equal(opened.blocks("Q8_0"), before)


def test_values_have_memory_of_their_own(opened: GgufFile) -> None:
    opened.dequantise("F32").fill_(7.0)
    assert not torch.any(opened.dequantise("F32") == 7.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "F64"])
def test_other_types_are_rounded_from_float32(
    opened: GgufFile, kind: str, dtype: torch.dtype
) -> None:
    assert torch.equal(opened.dequantise(kind, dtype), opened.dequantise(kind).to(dtype))


def test_wide_numbers_are_kept(tmp_path: Path) -> None:
    values = torch.randn(3, 5, dtype=torch.float64)
    opened = read_gguf(gguf.write_gguf(tmp_path / "m.gguf", {}, {"t": ("F64", values)}))
    assert torch.equal(opened.dequantise("t", torch.float64), values)
    assert torch.equal(opened.dequantise("t"), values.float())


def test_an_unknown_tensor_is_named_with_the_nearest(opened: GgufFile) -> None:
    with pytest.raises(FormatError, match=r"no tensor 'Q8_1'.*nearest name is 'Q[84]_[01]'"):
        opened.dequantise("Q8_1")


@pytest.mark.parametrize(("code", "name"), [(22, "IQ2_S"), (99, "type 99")])
def test_a_format_that_cannot_be_decoded_is_an_error_only_when_used(
    tmp_path: Path, code: int, name: str
) -> None:
    path = tmp_path / "m.gguf"
    infos = [gguf.info("odd", (1, 256), code, 0), gguf.info("plain", (2,), 0, 160)]
    path.write_bytes(gguf.assemble([], infos, bytes(160 + 8)))
    opened = read_gguf(path)
    assert opened.tensors["odd"].block.name == name
    assert opened.dequantise("plain").tolist() == [0.0, 0.0]
    for use in (opened.blocks, opened.dequantise):
        with pytest.raises(UnsupportedError, match=f"'odd' is stored as {name}; wanted F32.*Q8_0"):
            use("odd")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts files through /proc")
def test_nothing_is_open_when_nothing_is_used(tmp_path: Path) -> None:
    path = gguf.write_gguf(tmp_path / "m.gguf", {}, {"t": ("F32", torch.zeros(4))})
    before = len(os.listdir("/proc/self/fd"))
    blocks = read_gguf(path).blocks("t")
    assert blocks.shape == (16,)
    del blocks
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.model
def test_the_default_model_opens_and_has_finite_values(model_path: Path) -> None:
    opened = read_gguf(model_path)
    kinds = {tensor.block.name for tensor in opened.tensors.values()}
    count = 0
    for name in opened.tensors:
        values = opened.dequantise(name)
        assert torch.isfinite(values).all(), name
        count += values.numel()
    assert (kinds, count) == ({"F32", "Q4_1", "Q8_0"}, 134_515_008)
