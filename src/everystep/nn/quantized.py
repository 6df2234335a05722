"""Weights of 8 or 4 bits with their scales: what every executor reads.

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

Format = Literal["int8", "int4", "q8_0", "q4_0", "q4_1"]

BLOCK = 32
EIGHT_BITS = ("int8", "q8_0")


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A (rows, columns) matrix of codes: rows are output features, columns are inputs.

    `int8`: codes int8 (rows, columns), scales float32 (rows,); value = code * scale.
    `q8_0`: codes int8 (rows, columns), scales float16 (rows, columns / 32), one per block of 32.
    `int4`, `q4_0`, `q4_1`: codes uint8 (rows, columns / 2), scales float16 (rows, columns / 32);
    byte j of a block holds input j of it in its low half and input j + 16 in its high half. Without
    `mins` value = (code - 8) * scale, with `mins`, float16 like the scales, code * scale + min.
    `q4_0` never has them, `q4_1` always does.
    """

    format: Format
    codes: Tensor
    scales: Tensor
    mins: Tensor | None = None

    @property
    def rows(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """Inputs."""
        return self.codes.shape[1] * (1 if self.format in EIGHT_BITS else 2)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.columns

    @property
    def bytes(self) -> int:
        """What codes, scales and minimums take."""
        return sum(part.nbytes for part in self._tensors())

    @property
    def device(self) -> torch.device:
        """Where the codes lie."""
        return self.codes.device

    def dequantize(self) -> Tensor:
        """(rows, columns) values, float32."""
        if self.format == "int8":
            return self.codes * self.scales[:, None]
        values = self._centred().mul_(self.scales.float()[..., None])
        if self.mins is not None:
            values += self.mins.float()[..., None]
        return values.view(self.shape)

    def _centred(self) -> Tensor:
        """What the scales multiply, float32 (rows, blocks, 32), in memory of its own."""
        blocks = self.codes.view(self.rows, self.columns // BLOCK, -1)
        if self.format == "q8_0":
            return blocks.float()
        values = torch.empty(*blocks.shape[:2], BLOCK, device=self.device)
        values[..., : BLOCK // 2] = blocks & 0x0F
        values[..., BLOCK // 2 :] = blocks >> 4
        return values if self.mins is not None else values.sub_(8.0)

    def slice(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start` to `stop`, as views."""
        return self._each(lambda part: part[start:stop])

    def gather(self, rows: Tensor) -> QuantizedWeight:
        """The rows with these numbers, in their order; `rows`: (n,) int64."""
        return self._each(lambda part: part.index_select(0, rows))

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same weight on a device; itself if it is there."""
        return self._each(lambda part: part.to(device))

    def alike(self, other: object) -> bool:
        """Whether the rows of `other` can stand below these in one weight."""
        return (
            isinstance(other, QuantizedWeight)
            and (self.format, self.columns) == (other.format, other.columns)
            and (self.mins is None) == (other.mins is None)
        )

    @staticmethod
    def cat(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """One weight with the rows of all parts, in order; they must be alike."""
        first = parts[0]
        if not all(first.alike(part) for part in parts):
            formats = ", ".join(f"{part.format} of {part.columns} columns" for part in parts)
            what = "rows of different formats were to be joined"
            raise InvariantError(what, got=formats)
        if len(parts) == 1:
            return first
        columns = zip(*(part._tensors() for part in parts), strict=True)
        return QuantizedWeight(first.format, *(torch.cat(column) for column in columns))

    def _tensors(self) -> tuple[Tensor, ...]:
        given = (self.codes, self.scales, self.mins)
        return tuple(part for part in given if part is not None)

    def _each(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        return QuantizedWeight(self.format, *map(change, self._tensors()))
