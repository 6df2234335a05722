"""The exact float32 values of GGUF's quantised blocks.

Every decoder turns blocks, (n, bytes) uint8, into values, (n, elements) float32. A block of 32
shares a scale, and a minimum perhaps. A block of 256 has parts of 16 or 32 with small scales of
their own, which the block's scale multiplies. Products of codes and scales are exact in float32, so
each value is rounded once at most.

Block layouts: ggml, `ggml-common.h` (`block_q4_0` to `block_q8_0`, `block_q2_K` to `block_q6_K`,
`block_iq4_nl`, `block_iq4_xs`, `block_mxfp4`).
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a code of four bits stands for in IQ4_NL and IQ4_XS, and in MXFP4: there twice the value, of
# which the scale is half.
_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FLOATS_OF_4_BITS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def decode_q8_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, 32 int8."""
    torch.mul(blocks[:, 2:].view(torch.int8), _half(blocks, 0), out=out)


def decode_q4_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, 32 numbers 0..15 that stand for -8..7."""
    out.copy_(_nibbles(blocks[:, 2:]))
    out.sub_(8.0).mul_(_half(blocks, 0))


def decode_q4_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, a minimum, 32 numbers 0..15."""
    out.copy_(_nibbles(blocks[:, 4:]))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def decode_q5_0(blocks: Tensor, out: Tensor) -> None:
    """A scale, the fifth bits of 32 numbers, their other four: 0..31 for -16..15."""
    out.copy_(codes_of_q5_0(blocks))
    out.sub_(16.0).mul_(_half(blocks, 0))


def decode_q5_1(blocks: Tensor, out: Tensor) -> None:
    """A scale, a minimum, the fifth bits of 32 numbers, their other four."""
    out.copy_(_nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def decode_iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """A scale, 32 places on a curve."""
    torch.mul(_on(_CURVE, _nibbles(blocks[:, 2:])), _half(blocks, 0), out=out)


def decode_mxfp4(blocks: Tensor, out: Tensor) -> None:
    """The exponent of a scale, 32 floats of four bits. Source: OCP Microscaling Formats 1.0."""
    exponent = blocks[:, :1].int()
    # Half of 2^(exponent - 127); the two smallest are subnormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    torch.mul(_on(_FLOATS_OF_4_BITS, _nibbles(blocks[:, 1:])), bits.view(torch.float32), out=out)


def decode_q2_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16: scales and minimums of four bits, 256 numbers of two bits, both scales."""
    small, codes = blocks[:, :16], _planes(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    scales, mins = _half(blocks, 80) * (small & 15), _half(blocks, 82) * (small >> 4)
    _lifted(codes, scales, mins, out)


def decode_q3_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16: third bits, which count 4 down where they are 0, 256 numbers of two bits, 16
    scales of six bits around 32, the scale."""
    lacking = _planes(blocks[:, :32], 32, tuple(range(8)), 1) ^ 1
    codes = _planes(blocks[:, 32:96], 32, (0, 2, 4, 6), 3).to(torch.int8) - (lacking << 2)
    low = _planes(blocks[:, 96:104], 8, (0, 4), 15)
    high = _planes(blocks[:, 104:108], 4, (0, 2, 4, 6), 3)
    small = (low | high << 4).to(torch.int8) - 32
    _scaled(codes, _half(blocks, 108) * small, out)


def decode_q4_k(blocks: Tensor, out: Tensor) -> None:
    """8 parts of 32: both scales, six bits each for scale and minimum, 256 numbers of four bits."""
    _lifted(codes_of_q4_k(blocks), *_k_scales(blocks), out)


def decode_q5_k(blocks: Tensor, out: Tensor) -> None:
    """8 parts of 32: as in Q4_K, with fifth bits before the other four."""
    _lifted(codes_of_q5_k(blocks), *_k_scales(blocks), out)


def decode_q6_k(blocks: Tensor, out: Tensor) -> None:
    """16 parts of 16: 256 numbers of six bits around 32, four of them first, 16 int8 scales, the
    scale."""
    codes = codes_of_q6_k(blocks).to(torch.int8) - 32
    _scaled(codes, _half(blocks, 208) * blocks[:, 192:208].view(torch.int8), out)


def decode_iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """8 parts of 32: the scale, scales of six bits around 32, 256 places on a curve."""
    high = _planes(blocks[:, 2:4], 1, (0, 2, 4, 6), 3)
    low = _planes(blocks[:, 4:8], 1, (0, 4), 15)
    small = (low | high << 4).to(torch.int8) - 32
    codes = _planes(blocks[:, 8:], 16, (0, 4), 15)
    _scaled(_on(_CURVE, codes), _half(blocks, 0) * small, out)


def codes_of_q5_0(blocks: Tensor) -> Tensor:
    """(n, 32) uint8, 0..31 for -16..15."""
    return _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4


def codes_of_q4_k(blocks: Tensor) -> Tensor:
    """(n, 256) uint8, 0..15."""
    return _planes(blocks[:, 16:], 32, (0, 4), 15)


def codes_of_q5_k(blocks: Tensor) -> Tensor:
    """(n, 256) uint8, 0..31."""
    fifth = _planes(blocks[:, 16:48], 32, tuple(range(8)), 1)
    return _planes(blocks[:, 48:], 32, (0, 4), 15) | fifth << 4


def codes_of_q6_k(blocks: Tensor) -> Tensor:
    """(n, 256) uint8, 0..63 for -32..31."""
    low = _planes(blocks[:, :128], 64, (0, 4), 15)
    high = _planes(blocks[:, 128:192], 32, (0, 2, 4, 6), 3)
    return low | high << 4


def k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(n, 8) scales and minimums of the parts of Q4_K and Q5_K blocks, uint8.

    Twelve bytes after both scales hold them: the low six bits of the first eight are the first four
    scales and minimums; the others have their low four bits in the last four bytes, and two more
    above those six.
    """
    first, second, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (last & 15) | (first >> 2 & 48)], 1)
    mins = torch.cat([second & 63, (last >> 4) | (second >> 2 & 48)], 1)
    return scales, mins


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The same as float32, exactly."""
    scales, mins = k_scales(blocks)
    return _half(blocks, 0) * scales, _half(blocks, 2) * mins


def _half(blocks: Tensor, start: int) -> Tensor:
    """(n, 1) the float16 at this byte, as float32."""
    return blocks[:, start : start + 2].clone().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """(n, 16) -> (n, 32): byte i holds value i in its low half, value i + 16 in its high half."""
    return torch.cat([packed & 15, packed >> 4], 1)


def _bits(packed: Tensor) -> Tensor:
    """(n, m) -> (n, 8 m), the lowest bit of a byte first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _planes(packed: Tensor, width: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """(n, m) -> (n, m * shifts): each bit field of a run of `width` bytes is a run of values."""
    runs = packed.unflatten(1, (-1, 1, width))  # type: ignore[no-untyped-call]
    by = torch.tensor(shifts, dtype=torch.uint8)[:, None]
    return (runs >> by & mask).flatten(1)


def _on(values: tuple[int, ...], codes: Tensor) -> Tensor:
    """The values that codes stand for."""
    return torch.tensor(values, dtype=torch.int8)[codes.int()]


def _scaled(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Codes (n, e) times the scales (n, parts) of their parts."""
    parts = out.unflatten(1, (scales.shape[1], -1))  # type: ignore[no-untyped-call]
    torch.mul(codes.view_as(parts), scales[..., None], out=parts)


def _lifted(codes: Tensor, scales: Tensor, mins: Tensor, out: Tensor) -> None:
    """The same, less the minimums of the parts."""
    _scaled(codes, scales, out)
    parts = out.unflatten(1, (mins.shape[1], -1))  # type: ignore[no-untyped-call]
    parts.sub_(mins[..., None])
