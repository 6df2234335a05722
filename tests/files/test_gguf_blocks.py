"""The values of blocks, bit for bit: against a loop over single numbers, numpy, and `gguf`."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.files.gguf_blocks import BLOCK_TYPES, BlockType, block_type, decode_blocks
from tests.files.gguf_writer import encode

BY_NAME = {kind.name: kind for kind in BLOCK_TYPES.values()}
QUANTISED = ["Q8_0", "Q4_0", "Q4_1"]
LISTED = ["F32", "F16", "BF16", *QUANTISED]
DECODED = [kind.name for kind in BLOCK_TYPES.values() if kind.decode is not None]
# Where blocks have float16 scales and minimums.
SCALES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


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


@pytest.mark.parametrize("kind", LISTED)
def test_values_are_those_of_the_slow_loop(kind: str) -> None:
    raw = finite_blocks(kind, 300)
    wanted = torch.tensor(list(slow_values(kind, raw)), dtype=torch.float64).float()
    assert bits(decode(kind, raw)) == bits(wanted)


def by_gguf(kind: str, blocks: np.ndarray) -> Tensor:
    """What transformers' own reader makes of (n, bytes) blocks."""
    code = gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(blocks, code).astype(np.float32)).view(-1)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """The same bits, or both no number."""
    same = found.view(torch.int32) == wanted.view(torch.int32)
    assert bool((same | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("kind", [kind for kind in DECODED if kind != "F64"])
def test_random_blocks_are_what_gguf_makes_of_them(kind: str) -> None:
    size = (4000, BY_NAME[kind].nbytes)
    blocks = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with np.errstate(all="ignore"):
        wanted = by_gguf(kind, blocks)
    assert_same(decode(kind, blocks.reshape(-1)), wanted)


@pytest.mark.parametrize(("kind", "at"), [(kind, at) for kind, all in SCALES.items() for at in all])
def test_every_scale_is_what_gguf_makes_of_it(kind: str, at: int) -> None:
    """Infinities, NaN, zeros and subnormal numbers included, before random codes."""
    scales = np.arange(0, 65536, 1 if BY_NAME[kind].elements == 32 else 7, dtype="<u2")
    size = (len(scales), BY_NAME[kind].nbytes)
    blocks = np.random.default_rng(at).integers(0, 256, size, np.uint8)
    blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    assert_same(decode(kind, blocks.reshape(-1)), by_gguf(kind, blocks))


def test_every_exponent_is_what_gguf_makes_of_it() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    assert_same(decode("MXFP4", blocks.reshape(-1)), by_gguf("MXFP4", blocks))


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
    ("kind", "tolerance"),
    [("Q8_0", 1 / 127), ("Q4_0", 1 / 7), ("Q4_1", 1 / 15), ("Q4_K", 1 / 14), ("Q6_K", 1 / 30)],
)
def test_what_the_writer_stores_is_near_what_it_was_given(kind: str, tolerance: float) -> None:
    values = torch.rand(64, 256) * 2 - 1
    assert (decode(kind, encode(kind, values)).view(64, 256) - values).abs().max() < tolerance


def test_an_unknown_type_has_a_name_and_no_size() -> None:
    assert block_type(4242) == BlockType("type 4242", 0, 0)


def test_what_cannot_be_decoded_is_not_guessed() -> None:
    with pytest.raises(InvariantError, match="IQ2_S"):
        decode("IQ2_S", bytes(82))
