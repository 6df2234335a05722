"""The quantised tensors of a GGUF file as weights, block by block and bit for bit.

Only the place of bytes changes: scales and minimums leave their blocks. What a tensor is called and
how its rows are ordered is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.nn.quantized import Format, QuantizedWeight


@dataclass(frozen=True)
class _Layout:
    """A block of `nbytes`: a float16 scale, a float16 minimum where there is one, the codes."""

    format: Format
    nbytes: int
    codes: torch.dtype
    minimum: bool = False


_LAYOUTS: Mapping[str, _Layout] = {
    "Q8_0": _Layout("q8_0", 34, torch.int8),
    "Q4_0": _Layout("q4_0", 18, torch.uint8),
    "Q4_1": _Layout("q4_1", 20, torch.uint8, minimum=True),
}


def is_quantised(block_name: str) -> bool:
    """Whether tensors of this block format lost something to rounding, whether read here or not."""
    return block_name not in ("F64", "F32", "F16", "BF16")


def keeps_blocks(block_name: str) -> bool:
    """Whether tensors of this block format become quantised weights."""
    return block_name in _LAYOUTS


def weight_of_blocks(block_name: str, raw: Tensor) -> QuantizedWeight:
    """The weight that is stored as `raw`, uint8 (rows, bytes of a row), in memory of its own."""
    layout = _LAYOUTS[block_name]
    blocks = raw.view(raw.shape[0], -1, layout.nbytes)
    start = 4 if layout.minimum else 2
    codes = _copied(blocks[..., start:]).flatten(1).view(layout.codes)
    mins = _half(blocks[..., 2:4]) if layout.minimum else None
    return QuantizedWeight(layout.format, codes, _half(blocks[..., :2]), mins)


def _half(pairs: Tensor) -> Tensor:
    """(rows, blocks, 2) bytes -> (rows, blocks) float16."""
    return _copied(pairs).view(torch.float16).squeeze(2)


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)
