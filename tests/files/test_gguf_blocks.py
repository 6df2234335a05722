"""The values of blocks, bit for bit: against a loop over single numbers, numpy, and a recording."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.files.gguf_blocks import BLOCK_TYPES, BlockType, block_type, decode_blocks
from tests.files.gguf_writer import encode

BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
QUANTISED = ["Q8_0", "Q4_0", "Q4_1"]
DECODED = ["F32", "F16", "BF16", *QUANTISED]
RECORDED = json.loads((Path(__file__).parent / "data" / "gguf_blocks.json").read_text("utf-8"))


def decode(kind: str, raw: bytes | np.ndarray) -> Tensor:
    data = np.frombuffer(bytearray(raw), np.uint8)
    return decode_blocks(BY_NAME[kind], torch.from_numpy(data), torch.float32)


def rounded(value: float) -> float:
    """The float32 nearest to a Python number."""
    return float(np.float32(value))


def slow_values(kind: str, raw: bytes) -> Iterator[float]:
    """The values one after the other, from the layout as it is written down."""
    size = BY_NAME[kind].nbytes
    for start in range(0, len(raw), size):
        yield from slow_block(kind, raw[start : start + size])


def slow_block(kind: str, block: bytes) -> list[float]:
    if kind == "F32":
        return list(struct.unpack("<f", block))
    if kind == "F16":
        return list(struct.unpack("<e", block))
    if kind == "BF16":
        return list(struct.unpack("<f", b"\0\0" + block))
    scale = struct.unpack_from("<e", block)[0]
    if kind == "Q8_0":
        return [rounded(scale * number) for number in struct.unpack_from("<32b", block, 2)]
    packed = block[-16:]
    numbers = [byte % 16 for byte in packed] + [byte // 16 for byte in packed]
    if kind == "Q4_0":
        return [rounded(scale * (number - 8)) for number in numbers]
    minimum = struct.unpack_from("<e", block, 2)[0]
    return [rounded(rounded(scale * number) + minimum) for number in numbers]


def finite_blocks(kind: str, count: int) -> bytes:
    blocks = np.random.default_rng(1).integers(0, 256, (count, BY_NAME[kind].nbytes), np.uint8)
    high_bytes = {"F32": [3], "Q4_1": [1, 3]}.get(kind, [1])
    blocks[:, high_bytes] &= 0xBB
    return blocks.tobytes()


def bits(values: Tensor) -> list[int]:
    return values.view(torch.int32).tolist()


@pytest.mark.parametrize("kind", DECODED)
def test_values_are_those_of_the_slow_loop(kind: str) -> None:
    raw = finite_blocks(kind, 300)
    wanted = torch.tensor(list(slow_values(kind, raw)), dtype=torch.float64).float()
    assert bits(decode(kind, raw)) == bits(wanted)


@pytest.mark.parametrize("kind", DECODED)
def test_values_are_those_that_another_reader_gave(kind: str) -> None:
    raw = bytes.fromhex(RECORDED[kind]["blocks"])
    wanted = np.frombuffer(bytearray.fromhex(RECORDED[kind]["values"]), "<f4")
    assert bits(decode(kind, raw)) == bits(torch.from_numpy(wanted))


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_scale_gives_what_numpy_gives(kind: str) -> None:
    """Infinities, NaN, zeros and subnormal numbers included."""
    scales = np.arange(65536, dtype="<u2")
    blocks = np.zeros((65536, BY_NAME[kind].nbytes), np.uint8)
    blocks[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    # Each pattern of four bits, and signed bytes from -128 up.
    blocks[:, -16:] = np.arange(16, dtype=np.uint8) * 0x11 ^ 0x80
    scale = scales.view("<f2").astype(np.float32)[:, None]
    if kind == "Q8_0":
        numbers = blocks[:, 2:].view(np.int8).astype(np.float32)
    else:
        packed = blocks[:, -16:]
        numbers = np.concatenate([packed & 15, packed >> 4], 1).astype(np.float32)
    with np.errstate(all="ignore"):
        wanted = scale * (numbers - 8 if kind == "Q4_0" else numbers)
    np.testing.assert_array_equal(decode(kind, blocks).numpy(), wanted.reshape(-1))


def test_every_number_of_16_bits_is_kept() -> None:
    raw = np.arange(65536, dtype="<u2")
    with np.errstate(all="ignore"):
        wanted = raw.view("<f2").astype(np.float32)
    np.testing.assert_array_equal(decode("F16", raw.view(np.uint8)).numpy(), wanted)


def test_more_blocks_than_one_round_takes() -> None:
    one = finite_blocks("Q4_1", 1)
    values = decode("Q4_1", one * 20_001).view(-1, 32)
    assert torch.equal(values, decode("Q4_1", one).expand_as(values))


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("Q8_0", 1 / 127), ("Q4_0", 1 / 7), ("Q4_1", 1 / 15)]
)
def test_what_the_writer_stores_is_near_what_it_was_given(kind: str, tolerance: float) -> None:
    values = torch.rand(64, 32) * 2 - 1
    assert (decode(kind, encode(kind, values)).view(64, 32) - values).abs().max() < tolerance


def test_an_unknown_type_has_a_name_and_no_size() -> None:
    assert block_type(4242) == BlockType("type 4242", 0, 0)


def test_what_cannot_be_decoded_is_not_guessed() -> None:
    with pytest.raises(InvariantError, match="Q4_K"):
        decode("Q4_K", bytes(144))
