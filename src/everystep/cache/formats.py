"""In which form rows keep keys and values, and how these are written and read back.

A narrower type (`KvFormat`) costs the rounding and nothing else: every query that looks at a
position, even in the step that fed it, sees what the row keeps. A position depends on itself alone,
so neither chunks nor the batch change it. Codes of 8 bits have one scale per position and head,
which follows them in memory, so that rows are copied, shared and cut without knowing what they
hold.

Affine codes (`Quantization`) of 8 or 4 bits have a step and a least value per group. Keys are
grouped along positions, channel by channel, because a few channels are large at every position;
values are grouped along channels, position by position (KIVI, Liu et al. 2024). Where the codes lie
is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, shown

CacheDtype = Literal["float32", "float16", "int8"]

_SCALE_BYTES = 4


@dataclass(frozen=True)
class KvFormat:
    """The form of kept (..., D) keys or values of the type `computed`; `name` None: as they are."""

    computed: torch.dtype
    name: CacheDtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of what is kept."""
        return self.computed if self.name is None else getattr(torch, self.name)

    def width(self, dim: int) -> int:
        """Return how many numbers are kept of `dim`."""
        return dim + (_SCALE_BYTES if self.name == "int8" else 0)

    def packed(self, kv: Tensor) -> Tensor:
        """Return what is kept of (..., D)."""
        return _codes(kv.float()) if self.name == "int8" else kv.to(self.dtype)

    def unpacked(self, kept: Tensor) -> Tensor:
        """Return the (..., D) that what is kept stands for."""
        return (_values(kept) if self.name == "int8" else kept).to(self.computed)


def _codes(values: Tensor) -> Tensor:
    """Turn (..., D) float32 into (..., D + 4) int8: codes, then the bytes of their scale."""
    # What is not finite makes the scale NaN, and with it all that the codes stand for.
    scale = values.abs().amax(-1, keepdim=True) / 127 + (values * 0).sum(-1, keepdim=True)
    codes = (values / torch.where(scale == 0, 1.0, scale)).round().nan_to_num().to(torch.int8)
    return torch.cat([codes, scale.view(torch.int8)], dim=-1)


def _values(kept: Tensor) -> Tensor:
    """Undo `_codes`, up to rounding."""
    scale = kept[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
    return kept[..., :-_SCALE_BYTES] * scale


class Codes(NamedTuple):
    """One group of positions: `codes` uint8 (..., group, D or D / 2), `step` and `least` per group.

    For keys `step` and `least` are (..., 1, D); for values (..., group, D / channels), each for
    `channels` neighbours.
    """

    codes: Tensor
    step: Tensor
    least: Tensor

    def first(self, groups: int) -> Codes:
        """Return a copy of the first groups of (..., groups, group, D)."""
        return Codes(*(x[..., :groups, :, :].clone() for x in self))


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantisation of a cache.

    `bits`: 8 or 4 per number. `group`: positions that share the step of a key channel, and at most
    how many channels of a value share one. `residual`: the last so many positions, at least, keep
    their full precision.
    """

    bits: int = 4
    group: int = 64
    residual: int = 128

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise RequestError(
                "a cache is quantised to 8 or 4 bits",
                wanted="nbits=8 or 4",
                got=self.bits,
                do="Set nbits to 4",
            )
        for name, value, least in (
            ("q_group_size", self.group, 2),
            ("residual_length", self.residual, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise RequestError(
                    f"{name} is impossible", wanted=f"at least {least}", got=shown(value)
                )

    def packed(self, length: int) -> int:
        """Return how many of `length` positions are stored as integers: whole groups, the oldest
        first.

        It depends on the position alone, so it is the same however the positions were fed.
        """
        return max(length - self.residual, 0) // self.group * self.group

    def turn(self, places: np.ndarray) -> np.ndarray:
        """Return the first query position that sees the codes of each of the positions `places`."""
        return (places // self.group + 1) * self.group + self.residual

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Codes, Codes]:
        """Encode keys (..., group, D), with one step per channel, and values of the same shape.

        Values have one step per position and `group` channels, or as many of them as divide D.
        """
        dim, most = values.shape[-1], max(self.group, 2)
        channels = max(n for n in range(2, dim + 1, 2) if dim % n == 0 and n <= most)
        found = _encode(values.unflatten(-1, (-1, channels)), -1, self.bits)  # type: ignore[no-untyped-call]
        joined = Codes(found.codes.flatten(-2), found.step.squeeze(-1), found.least.squeeze(-1))
        return _encode(keys, -2, self.bits), joined

    def decode(self, keys: Codes, values: Codes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (..., group, D) keys and values that the codes stand for."""
        apart = values.codes.unflatten(-1, (values.step.shape[-1], -1))  # type: ignore[no-untyped-call]
        wide = Codes(apart, values.step[..., None], values.least[..., None])
        return _decode(keys, self.bits, dtype), _decode(wide, self.bits, dtype).flatten(-2)


def _encode(x: Tensor, dim: int, bits: int) -> Codes:
    """Encode with one step and least value along a dimension."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    kind = torch.float32 if x.dtype.itemsize >= 4 else torch.float16
    top = 2**bits - 1
    # Codes are made from the step and least value as they are stored, so that only codes round.
    least, step = low.to(kind), ((high - low) / top).to(kind)
    divisor = torch.where(step == 0, torch.ones_like(step), step)
    codes = ((x.to(step.dtype) - least) / divisor).round_().clamp_(0, top).to(torch.uint8)
    return Codes(codes[..., ::2] | codes[..., 1::2] << 4 if bits == 4 else codes, step, least)


def _decode(found: Codes, bits: int, dtype: torch.dtype) -> Tensor:
    codes, step, least = found
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return codes.to(dtype) * step.to(dtype) + least.to(dtype)
