"""Writing a GGUF file of version 3: its metadata, then its tensors one by one.

Tensors are written as they come, so that no more than one of them is held. Their names, shapes and
types have to be known before, since the header says where each lies. What keys mean is not known
here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.files.gguf_blocks import BLOCK_TYPES, BlockType
from everystep.files.gguf_header import DEFAULT_ALIGNMENT

_VERSION = 3
_CODES = {kind.name: code for code, kind in BLOCK_TYPES.items()}
BLOCKS = {kind.name: kind for kind in BLOCK_TYPES.values()}
"""Name of a block type -> the type."""
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_FORMATS = {_U32: "<I", _I32: "<i", _F32: "<f", _BOOL: "<?", _U64: "<Q"}


@dataclass(frozen=True)
class GgufEntry:
    """A tensor that will be written; `shape` in torch's order, rows of whole blocks."""

    name: str
    shape: tuple[int, ...]
    block: BlockType

    @property
    def nbytes(self) -> int:
        """The number of bytes that its blocks take."""
        return prod(self.shape) // self.block.elements * self.block.nbytes


def write_gguf(
    file: BinaryIO,
    metadata: Mapping[str, object],
    entries: Sequence[GgufEntry],
    tensors: Iterable[Tensor],
) -> None:
    """Write all of it into the file. `tensors`: the bytes of the entries, uint8, in their order.

    Metadata are texts, truth values, integers, floats (float32 in the file) and lists of one of
    these; InvariantError for others.
    """
    infos, offset = [], 0
    for one in entries:
        infos.append(_info(one, offset))
        offset += one.nbytes + -one.nbytes % DEFAULT_ALIGNMENT
    keys = [_string(key) + struct.pack("<I", code) + data for key, (code, data) in _all(metadata)]
    preamble = b"GGUF" + struct.pack("<IQQ", _VERSION, len(entries), len(keys))
    header = b"".join([preamble, *keys, *infos])
    file.write(header + bytes(-len(header) % DEFAULT_ALIGNMENT))
    for one, blocks in zip(entries, tensors, strict=True):
        if blocks.dtype != torch.uint8 or blocks.numel() != one.nbytes:
            raise InvariantError(f"{one.name} has other bytes than was said", wanted=one.nbytes)
        file.write(blocks.contiguous().numpy().data)
        file.write(bytes(-one.nbytes % DEFAULT_ALIGNMENT))


def _info(entry: GgufEntry, offset: int) -> bytes:
    """The fastest dimension comes first in the file."""
    shape = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
    return _string(entry.name) + shape + struct.pack("<IQ", _CODES[entry.block.name], offset)


def _all(metadata: Mapping[str, object]) -> Iterable[tuple[str, tuple[int, bytes]]]:
    return ((key, _value(value)) for key, value in metadata.items())


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> tuple[int, bytes]:
    """Return the type of a value, and its bytes."""
    if not isinstance(value, list):
        code = _type_of([value])
        return code, _packed(code, value)
    # Readers expect lists of signed integers, and single ones without a sign.
    code = _type_of(value) if value else _STRING
    code = _I32 if code == _U32 and max(value) < 1 << 31 else code
    data = b"".join(_packed(code, one) for one in value)
    return _ARRAY, struct.pack("<IQ", code, len(value)) + data


def _type_of(values: Sequence[Any]) -> int:
    """Return the type that holds all these values."""
    kinds = {type(value) for value in values}
    if kinds in ({str}, {bool}, {float}):
        return {str: _STRING, bool: _BOOL, float: _F32}[kinds.pop()]
    if kinds != {int}:
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvariantError("no type of GGUF metadata holds these", got=found)
    if min(values) < 0:
        return _I32
    return _U32 if max(values) < 1 << 32 else _U64


def _packed(code: int, value: object) -> bytes:
    return _string(str(value)) if code == _STRING else struct.pack(_FORMATS[code], value)
