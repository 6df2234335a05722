"""Panels: how a weight lies in memory for the native executor, and all that others read of it.

A panel is 16 rows side by side, one per lane of a vector; `executors/native/cpp/pack.h` has the
same layout in the kernels' words. Packing only moves bytes, so unpacking gives every bit back, and
the weight that panels were made of need not be kept. What multiplies by them is not known here.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.nn.quantized import (
    BLOCK,
    EIGHT_BITS,
    SUPER_BLOCK,
    WITH_SUPER_BLOCKS,
    Format,
    QuantizedWeight,
    block_bytes,
)

PANEL = 16
SIXTEEN_BITS = (torch.float16, torch.bfloat16)

_LINE = 64
_PIECE = 1 << 26
# A code of zero is stored as 128 where codes are signed.
_SIGN = 0x80


ReadRows = Callable[["Panels", int, int], Tensor]
"""The values of a weight's rows, from one to another."""


class Arena:
    """Memory for many matrices, in pieces so large that the system gives large pages.

    Fewer pages are fewer to look up per step. `bytes`: what was handed out.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._piece = torch.empty(0, dtype=torch.uint8)

    def room(self, size: int) -> Tensor:
        """Return so many bytes, from the beginning of a cache line on; not initialised."""
        taken = _whole_lines(size)
        if taken > len(self._piece):
            self._piece = _mapped(max(taken, _PIECE))
        self.bytes += taken
        room, self._piece = self._piece[:size], self._piece[taken:]
        return room


def _mapped(size: int) -> Tensor:
    """Return so many bytes from the beginning of a page on.

    They come from the system, not from the allocator: there they would lie between what is freed
    when a model is loaded, and keep it from being given back.
    """
    try:
        # Private where there is a choice: shared memory may get no large pages.
        private = getattr(mmap, "MAP_PRIVATE", None)
        piece = (
            mmap.mmap(-1, size) if private is None else mmap.mmap(-1, size, private | mmap.MAP_ANON)
        )
    except OSError as error:
        raise MemoryError(f"cannot allocate memory for {size} bytes of weights") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without large pages
            piece.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(piece, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Panels:
    """A (rows, columns) matrix in panels of 16 rows: values of type `floats` where `format` is
    None, codes otherwise.

    `data`: (panels, bytes of one) uint8. A panel holds values column after column, 16 each, or
    codes, then scales, minimums and scales of super-blocks. `row_scales`: the float32 scales of
    `int8`, for whole panels. `lifted`: there are minimums. `read`: what turns rows into values
    faster than operators do. Rows and columns beyond the last are zeros.
    """

    data: Tensor
    rows: int
    columns: int
    format: Format | None = None
    lifted: bool = False
    row_scales: Tensor | None = None
    floats: torch.dtype = torch.float32
    read: ReadRows | None = None

    @staticmethod
    def of(weight: Tensor | QuantizedWeight, arena: Arena, read: ReadRows | None = None) -> Panels:
        """Put the weight into the arena; floats of 16 bits as they are, others as float32."""
        rows, columns = weight.shape
        count = -(-rows // PANEL)
        if isinstance(weight, Tensor):
            floats = weight.dtype if weight.dtype in SIXTEEN_BITS else torch.float32
            size = _whole_lines(floats.itemsize * PANEL * columns)
            made = Panels(_panels(arena, count, size), rows, columns, floats=floats, read=read)
        else:
            lifted, row_scales = weight.mins is not None, None
            if weight.format == "int8":
                row_scales = F.pad(weight.scales, (0, count * PANEL - rows))
            size = _quantised_bytes(weight.format, columns, lifted)
            data = _panels(arena, count, size)
            made = Panels(data, rows, columns, weight.format, lifted, row_scales, read=read)
        for region, values in zip(made._regions(), _regular(weight), strict=True):
            _fill(region, values)
        if made.format in EIGHT_BITS:
            made._code_bytes(made.format).bitwise_xor_(_SIGN)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.columns

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return self.data.device

    def values(self) -> Tensor:
        """Return (panels, columns, 16) of type `floats` where they lie, if `format` is None."""
        (region,) = self._regions()
        return region

    def slice(self, start: int, stop: int) -> Tensor | QuantizedWeight:
        """Return rows `start` to `stop` as they were packed, in memory of their own."""
        first, last = start // PANEL, -(-stop // PANEL)
        lanes = [region[first:last].transpose(1, 2).flatten(0, 1) for region in self._regions()]
        cut = [part[start - first * PANEL : stop - first * PANEL] for part in lanes]
        scales = None if self.row_scales is None else self.row_scales[start:stop]
        return self._unpacked(cut, scales)

    def dense(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` as float32 values, (rows, columns)."""
        if self.read is not None:
            return self.read(self, start, stop)
        rows = self.slice(start, stop)
        return rows.float() if isinstance(rows, Tensor) else rows.dequantize()

    def gather(self, rows: Tensor) -> Tensor | QuantizedWeight:
        """Return the rows with these numbers, in their order; `rows`: (n,) int64."""
        panel, lane = rows // PANEL, rows % PANEL
        cut = [region[panel, :, lane] for region in self._regions()]
        return self._unpacked(cut, None if self.row_scales is None else self.row_scales[rows])

    def whole(self, start: int, stop: int) -> Panels | None:
        """Return rows `start` to `stop` where they lie; None where they are not whole panels."""
        if start % PANEL or (stop % PANEL and stop != self.rows):
            return None
        first, last = start // PANEL, -(-stop // PANEL)
        scales = self.row_scales
        if scales is not None:
            scales = scales[first * PANEL : last * PANEL]
        data = self.data[first:last]
        return replace(self, data=data, rows=stop - start, row_scales=scales)

    def _code_bytes(self, format: Format) -> Tensor:
        return self.data[:, : _blocks(self.columns) * PANEL * block_bytes(format)]

    def _regions(self) -> Iterator[Tensor]:
        """Yield the regions of a panel, one after another, as (panels, values of a row, 16) each.

        Of codes a value is a word of four bytes.
        """
        if self.format is None:
            yield _lanes(self.data.view(self.floats)[:, : PANEL * self.columns])
            return
        codes = self._code_bytes(self.format)
        yield _lanes(codes.view(torch.int32))
        before = codes.shape[1]
        for dtype, count in _scales(self.format, self.columns, self.lifted):
            size = PANEL * count * dtype.itemsize
            yield _lanes(self.data[:, before : before + size].view(dtype))
            before += size

    def _unpacked(self, parts: list[Tensor], row_scales: Tensor | None) -> Tensor | QuantizedWeight:
        """Return rows of a weight, made of those of its regions."""
        if self.format is None:
            return parts[0]
        codes = parts[0].contiguous().view(torch.uint8)
        if self.format in EIGHT_BITS:
            codes = codes.bitwise_xor(_SIGN).view(torch.int8)[:, : self.columns]
        scales = [row_scales] if row_scales is not None else parts[1:]
        names = [
            "scales",
            *["mins"] * self.lifted,
            *["super_scales"] * (self.format in WITH_SUPER_BLOCKS),
        ]
        found = {name: x.contiguous() for name, x in zip(names, scales, strict=True)}
        return QuantizedWeight(self.format, codes.contiguous(), **found)


def _regular(weight: Tensor | QuantizedWeight) -> Iterator[Tensor]:
    """Yield the contents of the regions, (rows, values of a row) each."""
    if isinstance(weight, Tensor):
        yield weight
        return
    codes = weight.codes
    missing = -weight.columns % BLOCK
    if missing:
        codes = F.pad(codes, (0, missing))
    yield codes.contiguous().view(torch.int32)
    if weight.format != "int8":
        yield from list(weight.tensors().values())[1:]


def _fill(region: Tensor, values: Tensor) -> None:
    """Fill (panels, n, 16) lanes with (rows, n) values; with zeros where rows are missing."""
    full, left = divmod(len(values), PANEL)
    region[:full].copy_(values[: full * PANEL].unflatten(0, (full, PANEL)).transpose(1, 2))  # type: ignore[no-untyped-call]
    if left:
        region[full].zero_()
        region[full, :, :left] = values[full * PANEL :].T


def _lanes(values: Tensor) -> Tensor:
    """View (panels, n * 16) as (panels, n, 16)."""
    return values.unflatten(1, (-1, PANEL))  # type: ignore[no-untyped-call]


def _panels(arena: Arena, count: int, size: int) -> Tensor:
    return arena.room(count * size).view(count, size)


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _scales(format: Format, columns: int, lifted: bool) -> list[tuple[torch.dtype, int]]:
    """Return type, and values of a row, of each part that follows the codes of a panel."""
    if format == "int8":
        return []
    blocks, super_blocks = _blocks(columns), columns // SUPER_BLOCK
    if format not in WITH_SUPER_BLOCKS:
        return [(torch.float16, blocks)] * (1 + lifted)
    if not lifted:
        return [(torch.int8, 2 * blocks), (torch.float16, super_blocks)]
    return [(torch.uint8, blocks), (torch.uint8, blocks), (torch.float16, 2 * super_blocks)]


def _quantised_bytes(format: Format, columns: int, lifted: bool) -> int:
    """Return the size of one panel, up to the end of its last cache line."""
    scales = sum(dtype.itemsize * count for dtype, count in _scales(format, columns, lifted))
    return _whole_lines(PANEL * (_blocks(columns) * block_bytes(format) + scales))


def _whole_lines(size: int) -> int:
    return -(-size // _LINE) * _LINE
