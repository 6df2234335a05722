"""Which form a model holds the quantised blocks of a GGUF file in.

Q8_0, Q4_0 and Q4_1 are kept bit for bit. Others are held in the nearest of these forms: Q5_0 and
IQ4_NL exactly, Q4_K with its scales rounded to float16, and the rest with codes of 8 bits for
blocks of 32. A `dtype` in their place gives the exact values.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everystep.files.gguf_blocks import BlockType, decode_blocks
from everystep.files.gguf_decoders import k_scales
from everystep.nn.quantized import BLOCK, Format, QuantizedWeight
from everystep.nn.rounding import eight_bits, storable

FLOATS = ("F64", "F32", "F16", "BF16")
# The forms that are kept, and the bytes of a block: a scale, a minimum in Q4_1, the codes.
_KEPT: Mapping[str, tuple[Format, int]] = {
    "Q8_0": ("q8_0", 34),
    "Q4_0": ("q4_0", 18),
    "Q4_1": ("q4_1", 20),
}
# Blocks of 32 whose values are whole multiples of their float16 scale, of 8 bits at most.
_MULTIPLES = ("Q5_0", "IQ4_NL")
_STRETCH_VALUES = 1 << 20


def weight_of_blocks(block: BlockType, raw: Tensor) -> QuantizedWeight | None:
    """The weight that is stored as `raw`, uint8 (rows, bytes of a row), in memory of its own.

    None for floats. UnsupportedError where a scale is beyond float16, or no number.
    """
    if block.name in FLOATS or block.decode is None:
        return None
    if block.name in _KEPT:
        return _kept(block.name, raw)
    return _of_q4_k(raw) if block.name == "Q4_K" else _in_eight_bits(block, raw)


def _kept(name: str, raw: Tensor) -> QuantizedWeight:
    format, block_bytes = _KEPT[name]
    blocks = raw.view(raw.shape[0], -1, block_bytes)
    mins = _halves(blocks, 2) if format == "q4_1" else None
    codes = blocks[..., 2 if mins is None else 4 :].clone(memory_format=torch.contiguous_format)
    kind = torch.int8 if format == "q8_0" else torch.uint8
    return QuantizedWeight(format, codes.flatten(1).view(kind), _halves(blocks, 0), mins)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The float16 of each block at this byte, (rows, blocks)."""
    pairs = blocks[..., start : start + 2].clone(memory_format=torch.contiguous_format)
    return pairs.view(torch.float16).squeeze(2)


def _of_q4_k(raw: Tensor) -> QuantizedWeight:
    """Parts of 32 as blocks with a minimum; their scales, of 17 bits, are rounded to 11."""
    rows, blocks = raw.shape[0], raw.reshape(-1, 144)
    scales, mins = (storable(one).view(rows, -1) for one in k_scales(blocks))
    # A run of 32 bytes holds one part in its low halves and the next in its high halves.
    runs = blocks[:, 16:].view(-1, 4, 1, BLOCK)
    parts = torch.cat([runs & 15, runs >> 4], 2)
    codes = parts[..., : BLOCK // 2] | parts[..., BLOCK // 2 :] << 4
    return QuantizedWeight("q4_1", codes.reshape(rows, -1), scales, -mins)


def _in_eight_bits(block: BlockType, raw: Tensor) -> QuantizedWeight:
    """Codes of 8 bits, a stretch of rows at a time: floats of a whole matrix may be gigabytes."""
    columns = raw.shape[1] // block.nbytes * block.elements
    stretches = raw.split(max(1, _STRETCH_VALUES // columns))  # type: ignore[no-untyped-call]
    return QuantizedWeight.cat([_stretch(block, one) for one in stretches])


def _stretch(block: BlockType, raw: Tensor) -> QuantizedWeight:
    values = decode_blocks(block, raw.reshape(-1), torch.float32).view(raw.shape[0], -1)
    if block.name in _MULTIPLES:
        return eight_bits(values, _halves(raw.view(raw.shape[0], -1, block.nbytes), 0))
    return eight_bits(values)
