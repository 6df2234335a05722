"""Weights of 4 to 8 bits with their scales: what every executor reads.

A weight keeps the codes that a file or a rounding gave it; nothing is rounded again. Codes lie row
by row, rows are output features, so that projections are joined and taken apart without touching a
block. How activations meet these codes is up to the code that multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from everystep.errors import InvariantError

Format = Literal["int8", "int4", "q8_0", "q4_0", "q4_1", "q5_0", "q4_k", "q5_k", "q6_k"]

BLOCK = 32
SUPER_BLOCK = 256
EIGHT_BITS = ("int8", "q8_0")
HIGH_BITS = {"q5_0": 1, "q5_k": 1, "q6_k": 2}
"""The number of bits beyond four that such codes have."""
WITH_SUPER_BLOCKS = ("q4_k", "q5_k", "q6_k")


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A (rows, columns) matrix of codes: rows are output features, columns are inputs.

    `int8`: codes int8 (rows, columns), scales float32 (rows,); value = code * scale.
    `q8_0`: codes int8 (rows, columns), scales float16 (rows, columns / 32), one per block of 32.
    `int4`, `q4_0`, `q4_1`: codes uint8 (rows, columns / 2), scales float16 (rows, columns / 32);
    byte j of a block holds input j of it in its low half and input j + 16 in its high half. Without
    `mins` value = (code - 8) * scale, with `mins`, float16 like the scales, code * scale + min.
    `q4_0` never has them, `q4_1` always does.
    `q5_0`: scales likewise; value = (code - 16) * scale. A block of `codes` has 16 bytes with four
    bits of each code, as above, then four, of which bit g of byte j is the fifth of input 4 g + j.
    `q4_k`, `q5_k`, `q6_k`: scales and minimums are small integers, which a super-block of 256
    inputs multiplies by floats of its own. `super_scales`: these, float16 (rows, n), those of all
    scales first, then those of all minimums. `q4_k` and `q5_k`: scales and `mins` uint8 (rows,
    columns / 32); value = code * (scale * super) - min * super. `q6_k`: scales int8 (rows, columns
    / 16); value = (code - 32) * (scale * super). Codes of `q4_k` lie as those of `q4_0`, of `q5_k`
    as those of `q5_0`; in `q6_k` two more bits are from bit 2 g of byte 4 p + j on for input
    16 p + 4 g + j.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None
    super_scales: Tensor | None = None

    @property
    def rows(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.codes.shape[1] * BLOCK // block_bytes(self.format)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.columns

    @property
    def bytes(self) -> int:
        """The size of codes, scales and minimums."""
        return sum(part.nbytes for part in self.tensors().values())

    @property
    def device(self) -> torch.device:
        """The device of the codes."""
        return self.codes.device

    def dequantize(self) -> Tensor:
        """Return (rows, columns) values, float32."""
        if self.format == "int8":
            return self.codes * self.scales[:, None]
        if self.super_scales is not None:
            return self._of_super_blocks(self.super_scales.float())
        values = self._centred().mul_(self.scales.float()[..., None])
        if self.mins is not None:
            values += self.mins.float()[..., None]
        return values.view(self.shape)

    def _centred(self) -> Tensor:
        """Return what the scales multiply, float32 (rows, blocks, 32), in memory of its own."""
        blocks = self.codes.view(self.rows, self.columns // BLOCK, -1)
        if self.format == "q8_0":
            return blocks.float()
        low = blocks[..., : BLOCK // 2]
        values = torch.empty(*blocks.shape[:2], BLOCK, device=self.device)
        values[..., : BLOCK // 2] = low & 0x0F
        values[..., BLOCK // 2 :] = low >> 4
        bits = HIGH_BITS.get(self.format, 0)
        if bits:
            values += _high_codes(blocks[..., BLOCK // 2 :], bits)
        return values if self.mins is not None else values.sub_(8 << bits)

    def _of_super_blocks(self, super_scales: Tensor) -> Tensor:
        """Round each value where GGUF's definition rounds it."""
        count = self.columns // SUPER_BLOCK

        def wide(small: Tensor, which: int) -> Tensor:
            own = super_scales[:, which * count : (which + 1) * count, None]
            return (small.view(self.rows, count, -1) * own).view(self.rows, -1, 1)

        values = self._centred().view(self.rows, self.scales.shape[1], -1)
        values *= wide(self.scales, 0)
        if self.mins is not None:
            values -= wide(self.mins, 1)
        return values.view(self.shape)

    def slice(self, start: int, stop: int) -> QuantizedWeight:
        """Return rows `start` to `stop`, as views."""
        return self._each(lambda part: part[start:stop])

    def gather(self, rows: Tensor) -> QuantizedWeight:
        """Return the rows with these numbers, in their order; `rows`: (n,) int64."""
        return self._each(lambda part: part.index_select(0, rows))

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the same weight on a device; itself if it is there."""
        return self._each(lambda part: part.to(device))

    def alike(self, other: object) -> bool:
        """Return whether the rows of `other` can stand below these in one weight."""
        return (
            isinstance(other, QuantizedWeight)
            and (self.format, self.columns) == (other.format, other.columns)
            and (self.mins is None) == (other.mins is None)
        )

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Make one weight of the rows of all parts, in order; they must be alike."""
        first = parts[0]
        if not all(first.alike(part) for part in parts):
            formats = ", ".join(f"{part.format} of {part.columns} columns" for part in parts)
            what = "rows of different formats were to be joined"
            raise InvariantError(what, got=formats)
        if len(parts) == 1:
            return first
        columns = {name: [part.tensors()[name] for part in parts] for name in first.tensors()}
        joined = {name: torch.cat(column) for name, column in columns.items()}
        return QuantizedWeight(first.format, **joined)

    def tensors(self) -> dict[str, Tensor]:
        """Return the fields that are tensors, by name."""
        names = ("codes", "scales", "mins", "super_scales")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        changed = {name: change(part) for name, part in self.tensors().items()}
        return QuantizedWeight(self.format, **changed)


def block_bytes(format: Format) -> int:
    """Return the size of the codes of 32 inputs of a row."""
    if format in EIGHT_BITS:
        return BLOCK
    return BLOCK // 2 + 4 * HIGH_BITS.get(format, 0)


def packed_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack (rows, columns) uint8 codes of 4 + `bits` bits as bytes, (rows, bytes of all blocks)."""
    blocks = codes.view(len(codes), -1, BLOCK)
    low, high = blocks & 0x0F, blocks >> 4
    parts = [low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4]
    if bits:
        # (rows, blocks, bytes, groups, 4): bits of several groups make a byte.
        groups = high.unflatten(2, (bits, 8 // bits, 4))  # type: ignore[no-untyped-call]
        parts.append((groups << _places(bits)).sum(3, dtype=torch.uint8).flatten(2))
    return torch.cat(parts, 2).flatten(1)


def _high_codes(packed: Tensor, bits: int) -> Tensor:
    """Turn (rows, blocks, 4 * bits) bytes into (rows, blocks, 32): what they add to codes."""
    groups = packed.unflatten(2, (bits, 1, 4))  # type: ignore[no-untyped-call]
    own = groups >> _places(bits).to(packed.device) & (1 << bits) - 1
    return (own << 4).flatten(2)


def _places(bits: int) -> Tensor:
    """Return (groups, 1): where the bits of each group begin in a byte."""
    return torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
