"""Rotary position embeddings (Su et al. 2021) and every way in use to stretch them.

A `Rope` says which frequencies turn the pairs (i, i + dim/2) of a head's first `dim` values. How
they are stretched is its scaling, one small class per kind. Dynamic and longrope frequencies depend
on a length: here always the length of the row after the feed that holds the position, so a row's
result never depends on its neighbours. Tables are made once per step. Everything is computed in
float32 and then cast, whatever the model's type, as in transformers (`modeling_rope_utils`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """`dim`: how many values of a head turn. `theta`: the base wavelength.

    `axes`: (dim/2,) the axis whose position turns each pair, where positions have several (M-RoPE,
    Wang et al. 2024); empty for one axis. See `section_axes`.
    """

    dim: int
    theta: float
    scaling: Scaling
    axes: tuple[int, ...] = ()


def section_axes(sections: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis of every pair, of which axis a turns `sections[a]`.

    One section follows the other, or the axes take turns as long as they have pairs left; the first
    axis takes those that remain.
    """
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis, count in enumerate(sections[1:], 1):
        axes[axis : len(sections) * count : len(sections)] = [axis] * count
    return tuple(axes)


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """`cos`: (..., N, 1, dim). `sin`: the same with its first half negated, for swapped halves."""

    cos: Tensor
    sin: Tensor


def rotary_table(
    rope: Rope, positions: Tensor, lengths: Tensor | None, dtype: torch.dtype
) -> RotaryTable:
    """Return the table for `positions` (..., N), or (axes, N) where the rope turns by several axes.

    Positions (N,) are equal on all axes. `lengths` (N,), on the CPU, matter to some ropes.
    """
    device, by_length = positions.device, rope.scaling.by_length
    if device.type == "cuda" and not by_length:
        frequencies = _kept_frequencies(rope, device)
    else:
        wanted = lengths if by_length else None
        frequencies = rope.scaling.frequencies(rope.dim, rope.theta, wanted).to(device)
    places = positions[..., None]
    if rope.axes and positions.dim() > 1:
        on_cpu = device.type == "cpu"
        places = positions[list(rope.axes) if on_cpu else _kept_axes(rope.axes, device)].T
    angles = places.float() * frequencies
    factor = rope.scaling.attention_factor
    cos, sin = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
    return RotaryTable(
        torch.cat((cos, cos), dim=-1).unsqueeze(-2), torch.cat((-sin, sin), dim=-1).unsqueeze(-2)
    )


# Copies from the host in each step would make the host wait for a GPU.


@lru_cache(maxsize=64)
def _kept_frequencies(rope: Rope, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return rope.scaling.frequencies(rope.dim, rope.theta, None).to(device)


@lru_cache(maxsize=64)
def _kept_axes(axes: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(axes).to(device)


def rotate_(x: Tensor, table: RotaryTable) -> None:
    """Turn (..., N, H, D) in place; values of a head beyond the table's width stay."""
    dim = table.cos.shape[-1]
    part = x if x.shape[-1] == dim else x[..., :dim]
    swapped = part.roll(dim // 2, dims=-1)
    part.mul_(table.cos).addcmul_(swapped, table.sin)


def inverse_frequencies(dim: int, theta: float | Tensor) -> Tensor:
    """Return theta^(-2i/dim) for i < dim/2, float32."""
    return 1.0 / theta ** _exponents(dim)


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


@dataclass(frozen=True)
class Interpolated:
    """Positions divided by `factor`, of which 1 leaves the original frequencies.

    Only the first `share` of the pairs turn, with exponents over the whole head (Gemma).
    """

    factor: float = 1.0
    share: float = 1.0
    attention_factor: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = False

    def frequencies(self, dim: int, theta: float, lengths: Tensor | None) -> Tensor:
        """Return (dim/2,), zeros for the pairs that stay."""
        frequencies = inverse_frequencies(dim, theta)
        frequencies[int(self.share * dim // 2) :] = 0.0
        return frequencies / self.factor


UNSCALED = Interpolated()


@dataclass(frozen=True)
class Dynamic:
    """A base that grows with the length beyond `trained` positions (NTK-aware, dynamic)."""

    factor: float
    trained: int
    attention_factor: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = True

    def frequencies(self, dim: int, theta: float, lengths: Tensor | None) -> Tensor:
        """Return (N, dim/2); (dim/2,) without lengths."""
        if lengths is None:
            return inverse_frequencies(dim, theta)
        # One length at a time: powers of single numbers and of arrays differ in their last bit.
        longest, place = torch.unique(lengths.clamp(min=self.trained), return_inverse=True)
        return torch.stack([self._at(dim, theta, length) for length in longest])[place]

    def _at(self, dim: int, theta: float, length: Tensor) -> Tensor:
        stretch = (self.factor * length / self.trained) - (self.factor - 1)
        return inverse_frequencies(dim, theta * stretch ** (dim / (dim - 2)))


@dataclass(frozen=True)
class Yarn:
    """Interpolated low and kept high frequencies with a ramp between (Peng et al. 2023)."""

    factor: float
    trained: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    by_length: ClassVar[bool] = False

    def frequencies(self, dim: int, theta: float, lengths: Tensor | None) -> Tensor:
        """Return (dim/2,)."""
        wavelengths = theta ** _exponents(dim)
        kept, interpolated = 1.0 / wavelengths, 1.0 / (self.factor * wavelengths)
        low, high = self._bounds(dim, theta)
        # A ramp of no width would divide by zero.
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        share = 1 - ramp
        return interpolated * (1 - share) + kept * share

    def _bounds(self, dim: int, theta: float) -> tuple[float, float]:
        """Return the pairs that turn `beta_fast` and `beta_slow` times over the trained length."""
        low, high = (
            dim * math.log(self.trained / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)


def yarn_attention_factor(factor: float, mscale: float | None, all_dim: float | None) -> float:
    """Return the attention factor where the configuration leaves it open."""

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if mscale and all_dim:
        return magnitude(mscale) / magnitude(all_dim)
    return magnitude(1.0)


@dataclass(frozen=True)
class LongRope:
    """One divisor per pair, another set for rows longer than `trained` (Ding et al. 2024)."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained: int
    attention_factor: float
    by_length: ClassVar[bool] = True

    def frequencies(self, dim: int, theta: float, lengths: Tensor | None) -> Tensor:
        """Return (N, dim/2); (dim/2,) without lengths."""
        wavelengths = theta ** _exponents(dim)
        short = 1.0 / (torch.tensor(self.short) * wavelengths)
        if lengths is None:
            return short
        long = 1.0 / (torch.tensor(self.long) * wavelengths)
        return torch.where(lengths[:, None] > self.trained, long, short)


@dataclass(frozen=True)
class Llama3:
    """Low frequencies divided by `factor`, high ones kept, smooth between (Llama 3.1)."""

    factor: float
    low: float
    high: float
    trained: int
    attention_factor: ClassVar[float] = 1.0
    by_length: ClassVar[bool] = False

    def frequencies(self, dim: int, theta: float, lengths: Tensor | None) -> Tensor:
        """Return (dim/2,)."""
        plain = inverse_frequencies(dim, theta)
        wavelengths = 2 * math.pi / plain
        smooth = (self.trained / wavelengths - self.low) / (self.high - self.low)
        between = (1 - smooth) * plain / self.factor + smooth * plain
        stretched = torch.where(wavelengths > self.trained / self.low, plain / self.factor, between)
        return torch.where(wavelengths < self.trained / self.high, plain, stretched)


Scaling = Interpolated | Dynamic | Yarn | LongRope | Llama3
"""The stretching of frequencies: `frequencies` for a head's `dim` and base `theta` are float32,
(dim/2,), or (N, dim/2) where they depend on the row's length (`by_length`) and `lengths` (N,) are
given. Cos and sin are multiplied with `attention_factor`."""
