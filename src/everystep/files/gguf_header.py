"""The header of a GGUF file, read strictly.

A header is written by a stranger: every count, length, offset, alignment and type is compared with
the bytes that are really there before anything is allocated or repeated for it, and all sizes are
Python integers, which do not wrap. What passes here describes tensors that lie whole, aligned and
apart inside the file. Nothing here knows what a key or a tensor means to a model.

Source: the GGUF specification, versions 2 and 3, in the ggml repository (`docs/gguf.md`).
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from everystep.errors import FormatError, UnsupportedError
from everystep.files.gguf_blocks import BlockType, block_type
from everystep.files.opening import impostor

MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
MAX_STRING_BYTES = 16 << 20
MAX_KEYS = 100_000
MAX_TENSORS = 200_000
MAX_ELEMENTS = 1 << 23
MAX_STRINGS = 1 << 21
"""Array elements in all of a file's metadata: a vocabulary of a million and its merges fit."""
MAX_NESTING = 4
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 65_536

_MAGIC = b"GGUF"
_U64 = struct.Struct("<Q")
_PREAMBLE_BYTES = 24
# What one entry takes at least: an empty key, a type and one byte; an empty name and one dimension.
_MIN_KEY_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("<u1"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
# What an element of an array takes at least: an empty text; an array's type and length.
_LEAST_BYTES = {_STRING: 8, _ARRAY: 12, **{code: kind.itemsize for code, kind in _NUMBERS.items()}}


@dataclass(frozen=True)
class GgufTensor:
    """The place and the format of a tensor; `shape` is in torch's order, `offset` from the file
    start.

    For an unknown block type `nbytes` is 0.
    """

    name: str
    shape: tuple[int, ...]
    block: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // (self.block.elements or 1) * self.block.nbytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def read_header(data: memoryview, name: str) -> tuple[dict[str, object], dict[str, GgufTensor]]:
    """Read the metadata and the tensors, by name, of a file whose bytes are `data`, all checked.

    `name` is for errors: FormatError, and UnsupportedError for a version that is not read.
    """
    reader = _Reader(data, name)
    tensor_count, key_count = _read_preamble(reader)
    metadata = _read_metadata(reader, key_count)
    alignment = _alignment(reader, metadata)
    tensors: dict[str, GgufTensor] = {}
    for _ in range(tensor_count):
        tensor = _read_tensor(reader, alignment)
        if tensor.name in tensors:
            raise reader.error(f"the tensor {tensor.name!r} comes twice")
        tensors[tensor.name] = tensor
    start = -(-reader.position // alignment) * alignment
    placed = {name: replace(one, offset=start + one.offset) for name, one in tensors.items()}
    _check_places(reader, list(placed.values()))
    return metadata, placed


class _Reader:
    """A position in the file's bytes that never passes their end."""

    def __init__(self, data: memoryview, name: str) -> None:
        self.data = data
        self.name = name
        self.position = 0
        self.elements = 0
        self.strings = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def error(self, what: str, wanted: object = None, got: object = None) -> FormatError:
        return FormatError(f"{self.name}: {what}", wanted=wanted, got=got)

    def take(self, nbytes: int, what: str) -> memoryview:
        if nbytes > self.left:
            raise self.error(
                f"{what} runs past the end of the file",
                f"{nbytes} bytes at offset {self.position}",
                f"{self.left} bytes",
            )
        start = self.position
        self.position += nbytes
        return self.data[start : self.position]

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        start = self.position
        if len(self.data) - start < 8:
            self.take(8, what)
        self.position = start + 8
        # There are hundreds of thousands of them: a length before every token and merge.
        return int(_U64.unpack_from(self.data, start)[0])

    def string(self, what: str, limit: int) -> str:
        length = self.u64(what)
        start = self.position
        end = start + length
        # Compared with the file before the limit: "past the end" says more than "too long".
        if end > len(self.data):
            self.take(length, what)
        if length > limit:
            raise self.error(f"{what} is too long", f"at most {limit} bytes", length)
        self.position = end
        try:
            return str(self.data[start:end], "utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8", got=error.reason) from error

    def array_of_strings(self, count: int, what: str, limit: int) -> list[object]:
        """As many calls of `string`, in one loop: a vocabulary with its merges has a hundred
        thousand. Where one is wrong, `string` says how."""
        data, start, found = self.data, self.position, list[object]()
        last = len(data) - _U64.size
        with suppress(UnicodeDecodeError):
            while len(found) < count and start <= last:
                begin = start + _U64.size
                (length,) = _U64.unpack_from(data, start)
                end = begin + length
                if end > len(data) or length > limit:
                    break
                found.append(str(data[begin:end], "utf-8"))
                start = end
        self.position = start
        found.extend(self.string(what, limit) for _ in range(count - len(found)))
        return found


def _read_preamble(reader: _Reader) -> tuple[int, int]:
    """Read the counts of tensors and keys, each possible for a file of this size."""
    if len(reader.data) < _PREAMBLE_BYTES or bytes(reader.data[:4]) != _MAGIC:
        raise _not_gguf(reader)
    reader.take(4, "the magic")
    version = reader.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise UnsupportedError(
            f"{reader.name}: this version of GGUF is not read",
            wanted="2 or 3, little-endian",
            got=f"{swapped} in big-endian order" if 0 < swapped < version else version,
            do="Convert the model again with a current tool",
        )
    tensors, keys = reader.u64("the tensor count"), reader.u64("the metadata count")
    for what, count, limit, least in (
        ("metadata keys", keys, MAX_KEYS, _MIN_KEY_BYTES),
        ("tensors", tensors, MAX_TENSORS, _MIN_TENSOR_BYTES),
    ):
        possible = min(limit, reader.left // least)
        if count > possible:
            raise reader.error(f"the file claims too many {what}", f"at most {possible}", count)
    return tensors, keys


def _not_gguf(reader: _Reader) -> FormatError:
    start = bytes(reader.data[:64])
    if len(start) < _PREAMBLE_BYTES and start[:4] in (_MAGIC, b""):
        return reader.error(
            "the file is too small", f"at least {_PREAMBLE_BYTES} bytes", f"{len(start)} bytes"
        )
    known = impostor(start)
    if known is not None:
        return reader.error(f"this is {known}")
    return reader.error("this is not a GGUF file", f"{_MAGIC!r} first", repr(start[:4]))


def _read_metadata(reader: _Reader, count: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(count):
        key = reader.string(f"key {index} of the metadata", MAX_KEY_BYTES)
        if not key:
            raise reader.error(f"key {index} of the metadata is empty")
        if key in metadata:
            raise reader.error(f"the metadata key {key!r} comes twice")
        metadata[key] = _read_value(reader, key, reader.u32(f"the type of {key!r}"), 0)
    return metadata


def _read_value(reader: _Reader, key: str, code: int, depth: int) -> object:
    what = f"the value of {key!r}"
    if code == _STRING:
        return reader.string(what, MAX_STRING_BYTES)
    if code == _ARRAY:
        return _read_array(reader, key, depth + 1)
    return _read_numbers(reader, what, code, 1)[0]


def _read_array(reader: _Reader, key: str, depth: int) -> list[object]:
    if depth > MAX_NESTING:
        raise reader.error(f"the arrays of {key!r} are nested too deeply", f"at most {MAX_NESTING}")
    code = reader.u32(f"the element type of {key!r}")
    count = reader.u64(f"the length of {key!r}")
    if code not in _LEAST_BYTES:
        raise _unknown_type(reader, f"the elements of {key!r}", code)
    least = _LEAST_BYTES[code]
    if count > reader.left // least:
        raise reader.error(
            f"the array {key!r} runs past the end of the file",
            f"at most {reader.left // least} elements",
            count,
        )
    reader.elements += count
    if reader.elements > MAX_ELEMENTS:
        raise reader.error("the metadata's arrays are too long", f"{MAX_ELEMENTS} elements in all")
    reader.strings += count if code == _STRING else 0
    if reader.strings > MAX_STRINGS:
        raise reader.error("the metadata hold too many strings", f"{MAX_STRINGS} in all")
    what = f"the value of {key!r}"
    if code in _NUMBERS:
        return _read_numbers(reader, what, code, count)
    if code == _STRING:
        return reader.array_of_strings(count, what, MAX_STRING_BYTES)
    return [_read_value(reader, key, code, depth) for _ in range(count)]


def _unknown_type(reader: _Reader, what: str, code: int) -> FormatError:
    return reader.error(f"{what} has an unknown type", "one of 0 to 12", code)


def _read_numbers(reader: _Reader, what: str, code: int, count: int) -> list[object]:
    if code not in _NUMBERS:
        raise _unknown_type(reader, what, code)
    kind = _NUMBERS[code]
    values: list[object] = np.frombuffer(reader.take(count * kind.itemsize, what), kind).tolist()
    if code != _BOOL:
        return values
    if any(value not in (0, 1) for value in values):
        raise reader.error(f"{what} is no truth value", "0 or 1")
    return [value == 1 for value in values]


def _alignment(reader: _Reader, metadata: dict[str, object]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    wanted = f"a power of two from 8 to {MAX_ALIGNMENT}"
    if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise reader.error("general.alignment is impossible", wanted, repr(value))
    return value


def _read_tensor(reader: _Reader, alignment: int) -> GgufTensor:
    """Read a tensor as the header describes it; its offset counts from the start of the data."""
    name = reader.string("a tensor's name", MAX_TENSOR_NAME_BYTES)
    what = f"tensor {name!r}"
    rank = reader.u32(f"the rank of {what}")
    if not name:
        raise reader.error("a tensor has no name")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise reader.error(f"{what} has an impossible rank", f"1 to {MAX_DIMENSIONS}", rank)
    # The file names the fastest dimension first, torch last.
    shape = tuple(reader.u64(f"the shape of {what}") for _ in range(rank))[::-1]
    if min(shape) < 1:
        raise reader.error(f"{what} has an empty dimension", got=shape)
    block = block_type(reader.u32(f"the type of {what}"))
    if block.elements and shape[-1] % block.elements:
        raise reader.error(
            f"the rows of {what} are not whole {block.name} blocks",
            f"a multiple of {block.elements}",
            shape[-1],
        )
    offset = reader.u64(f"the offset of {what}")
    if offset % alignment:
        raise reader.error(f"{what} is not aligned", f"a multiple of {alignment}", offset)
    return GgufTensor(name, shape, block, offset)


def _check_places(reader: _Reader, tensors: list[GgufTensor]) -> None:
    """Refuse a tensor that does not lie whole inside the file, or lies over another."""
    for tensor in tensors:
        if tensor.end > len(reader.data):
            raise reader.error(
                f"tensor {tensor.name!r} runs past the end of the file",
                f"a file of {tensor.end} bytes",
                f"{len(reader.data)} bytes",
            )
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    for first, second in pairwise(tensors):
        if first.end > second.offset:
            raise reader.error(
                f"the tensors {first.name!r} and {second.name!r} overlap",
                f"{second.name!r} at {first.end} or later",
                second.offset,
            )
