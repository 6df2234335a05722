"""Keys and values as integers of 8 or 4 bits: codes, and a step and a least value per group.

Keys are grouped along positions, channel by channel, because a few channels are large at every
position; values are grouped along channels, position by position (KIVI, Liu et al. 2024). Which
positions are stored this way, and where the codes lie, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.errors import RequestError, message

BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a cache is quantised.

    `bits`: 8 or 4 per number. `group`: positions that share the step of a key channel, and at most
    how many channels of a value share one. `residual`: the last so many positions, at least, keep
    their full precision.
    """

    bits: int = 4
    group: int = 64
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise RequestError(
                message("a cache is quantised to 8 or 4 bits", wanted="nbits=8 or 4", got=self.bits)
            )
        for name, value, least in (
            ("q_group_size", self.group, 2),
            ("residual_length", self.residual, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RequestError(
                    message(f"{name} is impossible", wanted=f"at least {least}", got=repr(value))
                )

    def packed(self, length: int) -> int:
        """How many of `length` positions are stored as integers: whole groups, the oldest first.

        It depends on the position alone, so it is the same however the positions were fed.
        """
        return max(length - self.residual, 0) // self.group * self.group


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """One group of positions: `codes` uint8 (..., group, D or D / 2), `step` and `least` per group.

    For keys `step` and `least` are (..., 1, D); for values (..., group, D / channels), each for
    `channels` neighbours.
    """

    codes: Tensor
    step: Tensor
    least: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that is stored."""
        return self.codes, self.step, self.least


def encode_keys(keys: Tensor, bits: int) -> Codes:
    """(..., group, D): one step and least value per channel."""
    return _encode(keys, keys.amin(-2, keepdim=True), keys.amax(-2, keepdim=True), bits)


def encode_values(values: Tensor, bits: int, group: int) -> Codes:
    """(..., group, D): one step and least value per position and `group` channels, or fewer."""
    apart = values.unflatten(-1, (-1, value_channels(values.shape[-1], group)))  # type: ignore[no-untyped-call]
    found = _encode(apart, apart.amin(-1, keepdim=True), apart.amax(-1, keepdim=True), bits)
    return Codes(found.codes.flatten(-2), found.step.squeeze(-1), found.least.squeeze(-1))


def decode_keys(found: Codes, bits: int, dtype: torch.dtype) -> Tensor:
    """(..., group, D), what `encode_keys` kept."""
    return _decode(found.codes, found.step, found.least, bits, dtype)


def decode_values(found: Codes, bits: int, dtype: torch.dtype) -> Tensor:
    """(..., group, D), what `encode_values` kept."""
    apart = found.codes.unflatten(-1, (found.step.shape[-1], -1))  # type: ignore[no-untyped-call]
    return _decode(apart, found.step[..., None], found.least[..., None], bits, dtype).flatten(-2)


def value_channels(head_dim: int, group: int) -> int:
    """How many channels of a value share a step: the largest divisor of D within the group."""
    return max(n for n in range(2, head_dim + 1, 2) if head_dim % n == 0 and n <= max(group, 2))


def step_type(dtype: torch.dtype) -> torch.dtype:
    """What steps and least values are stored as, for numbers of the given type."""
    return torch.float32 if dtype.itemsize >= 4 else torch.float16


def _encode(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Codes:
    kind = step_type(x.dtype)
    top = 2**bits - 1
    # Codes are made from the step and least value as they are stored, so that only codes round.
    least, step = low.to(kind), ((high - low) / top).to(kind)
    divisor = torch.where(step == 0, torch.ones_like(step), step)
    codes = ((x.to(step.dtype) - least) / divisor).round_().clamp_(0, top).to(torch.uint8)
    return Codes(codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes, step, least)


def _decode(codes: Tensor, step: Tensor, least: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes.to(dtype) * step.to(dtype) + least.to(dtype)
