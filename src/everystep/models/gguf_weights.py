"""Which form a model holds the quantised blocks of a GGUF file in.

Q8_0, Q4_0, Q4_1, Q5_0, Q4_K, Q5_K and Q6_K are kept bit for bit. Others become codes of 8 bits for
blocks of 32: IQ4_NL exactly, the rest rounded. A `dtype` in their place gives the exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from everystep.files.gguf_blocks import BlockType, decode_blocks
from everystep.files.gguf_decoders import (
    codes_of_q4_k,
    codes_of_q5_0,
    codes_of_q5_k,
    codes_of_q6_k,
    k_scales,
)
from everystep.nn.quantized import HIGH_BITS, Format, QuantizedWeight, packed_codes
from everystep.nn.rounding import eight_bits, storable

FLOATS = ("F64", "F32", "F16", "BF16")
# The forms that are kept, and the bytes of a block: a scale, a minimum in Q4_1, the codes.
_KEPT: Mapping[str, tuple[Format, int]] = {
    "Q8_0": ("q8_0", 34),
    "Q4_0": ("q4_0", 18),
    "Q4_1": ("q4_1", 20),
}
# Forms whose codes are put in another order, and how they are read.
_REORDERED: Mapping[str, tuple[Format, Callable[[Tensor], Tensor]]] = {
    "Q5_0": ("q5_0", codes_of_q5_0),
    "Q4_K": ("q4_k", codes_of_q4_k),
    "Q5_K": ("q5_k", codes_of_q5_k),
    "Q6_K": ("q6_k", codes_of_q6_k),
}
_STRETCH_VALUES = 1 << 20


def weight_of_blocks(block: BlockType, raw: Tensor) -> QuantizedWeight | None:
    """Return the weight that is stored as `raw`, uint8 (rows, bytes of a row), in its own memory.

    None for floats. Raise UnsupportedError where a scale is beyond float16, or no number.
    """
    if block.name in FLOATS or block.decode is None:
        return None
    if block.name in _KEPT:
        return _kept(block.name, raw)
    columns = raw.shape[1] // block.nbytes * block.elements
    # A stretch of rows at a time: codes or floats of a whole matrix may be gigabytes.
    stretches = raw.split(max(1, _STRETCH_VALUES // columns))  # type: ignore[no-untyped-call]
    held = _reordered if block.name in _REORDERED else _in_eight_bits
    return QuantizedWeight.cat([held(block, one) for one in stretches])


def _kept(name: str, raw: Tensor) -> QuantizedWeight:
    format, block_bytes = _KEPT[name]
    blocks = raw.view(raw.shape[0], -1, block_bytes)
    mins = _halves(blocks, 2) if format == "q4_1" else None
    codes = blocks[..., 2 if mins is None else 4 :].clone(memory_format=torch.contiguous_format)
    kind = torch.int8 if format == "q8_0" else torch.uint8
    return QuantizedWeight(format, codes.flatten(1).view(kind), _halves(blocks, 0), mins)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 of each block at this byte, (rows, blocks)."""
    pairs = blocks[..., start : start + 2].clone(memory_format=torch.contiguous_format)
    return pairs.view(torch.float16).squeeze(2)


def _reordered(block: BlockType, raw: Tensor) -> QuantizedWeight:
    """Return codes, scales and minimums as they are."""
    format, codes_of = _REORDERED[block.name]
    rows, blocks = raw.shape[0], raw.view(raw.shape[0], -1, block.nbytes)
    flat = blocks.view(-1, block.nbytes)
    codes = packed_codes(codes_of(flat).view(rows, -1), HIGH_BITS.get(format, 0))
    if format == "q5_0":
        return QuantizedWeight(format, codes, storable(_halves(blocks, 0)))
    if format == "q6_k":
        scales = flat[:, 192:208].view(torch.int8).reshape(rows, -1)
        return QuantizedWeight(format, codes, scales, super_scales=storable(_halves(blocks, 208)))
    scales, mins = (one.view(rows, -1) for one in k_scales(flat))
    super_scales = torch.cat([_halves(blocks, 0), _halves(blocks, 2)], 1)
    return QuantizedWeight(format, codes, scales, mins, storable(super_scales))


def _in_eight_bits(block: BlockType, raw: Tensor) -> QuantizedWeight:
    values = decode_blocks(block, raw.reshape(-1), torch.float32).view(raw.shape[0], -1)
    if block.name == "IQ4_NL":  # whole multiples of a float16
        return eight_bits(values, _halves(raw.view(raw.shape[0], -1, block.nbytes), 0))
    return eight_bits(values)
