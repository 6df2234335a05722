"""The block formats of GGUF tensors and their exact values.

A row of a quantised tensor is a run of blocks; the value of a block is defined in float32, as in
ggml, and is rounded to another type only afterwards (`gguf_decoders.py`). Formats that are not
decoded here are known by name and size, so that a file which holds them can be listed and checked.
This file knows no container and no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.files import gguf_decoders

# Values decoded at a time. torch splits operations on 32,768 values or more among its threads;
# where other programs use the cores as well, each of these thousands of operations would then wait
# for the slowest one, and decoding takes seconds instead of a fraction of one. A round also stays
# in a core's cache.
_CHUNK_VALUES = 31 << 10


@dataclass(frozen=True)
class BlockType:
    """A format of stored values: `elements` of them in `nbytes` bytes.

    `decode(blocks, out)` turns (n, nbytes) uint8 into (n, elements) float32; None when the format
    is not supported. Of an unknown format `elements` and `nbytes` are 0.
    """

    name: str
    elements: int
    nbytes: int
    decode: Callable[[Tensor, Tensor], None] | None = None


def decode_blocks(kind: BlockType, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `raw` (uint8, one dimension, whole blocks of a decodable kind), one
    dimension.

    The result owns its memory.
    """
    if kind.decode is None:
        raise InvariantError(f"blocks of {kind.name} were to be decoded.")
    blocks = raw.view(-1, kind.nbytes)
    values = torch.empty(blocks.shape[0], kind.elements, dtype=dtype)
    step = max(1, _CHUNK_VALUES // kind.elements)
    scratch = torch.empty(min(step, blocks.shape[0]), kind.elements)
    for start in range(0, blocks.shape[0], step):
        chunk, out = blocks[start : start + step], values[start : start + step]
        # Plain numbers are rounded once, from their own type.
        direct = dtype == torch.float32 or kind.elements == 1
        made = out if direct else scratch[: len(chunk)]
        kind.decode(chunk, made)
        if made is not out:
            out.copy_(made)
    return values.view(-1)


def block_type(code: int) -> BlockType:
    """Return the format with this number in a GGUF file; one named "type N" if it is unknown."""
    return BLOCK_TYPES.get(code) or BlockType(f"type {code}", 0, 0)


def _decode_plain(stored: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    def decode(blocks: Tensor, out: Tensor) -> None:
        out.copy_(blocks.view(stored))

    return decode


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, _decode_plain(torch.float32)),
    1: BlockType("F16", 1, 2, _decode_plain(torch.float16)),
    2: BlockType("Q4_0", 32, 18, gguf_decoders.decode_q4_0),
    3: BlockType("Q4_1", 32, 20, gguf_decoders.decode_q4_1),
    6: BlockType("Q5_0", 32, 22, gguf_decoders.decode_q5_0),
    7: BlockType("Q5_1", 32, 24, gguf_decoders.decode_q5_1),
    8: BlockType("Q8_0", 32, 34, gguf_decoders.decode_q8_0),
    10: BlockType("Q2_K", 256, 84, gguf_decoders.decode_q2_k),
    11: BlockType("Q3_K", 256, 110, gguf_decoders.decode_q3_k),
    12: BlockType("Q4_K", 256, 144, gguf_decoders.decode_q4_k),
    13: BlockType("Q5_K", 256, 176, gguf_decoders.decode_q5_k),
    14: BlockType("Q6_K", 256, 210, gguf_decoders.decode_q6_k),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, gguf_decoders.decode_iq4_nl),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136, gguf_decoders.decode_iq4_xs),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8, _decode_plain(torch.float64)),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2, _decode_plain(torch.bfloat16)),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17, gguf_decoders.decode_mxfp4),
}

SUPPORTED = tuple(kind.name for kind in BLOCK_TYPES.values() if kind.decode is not None)
