"""GGUF files for tests: whole ones from metadata and tensors, broken ones from their pieces.

`gguf_bytes` and `write_gguf` are strict: what they are given must fit the format. The functions for
pieces (`string`, `entry`, `info`, `assemble`) check nothing, so that any contradiction can be
written down. Quantisation rounds to the nearest value; it is not the one of any other tool.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 32
STRING, ARRAY, U32 = 8, 9, 4
TYPE_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}

Stored = tuple[str, Tensor]
"""A block type and the values to be stored so."""


def write_gguf(
    path: Path, metadata: Mapping[str, object], tensors: Mapping[str, Stored], version: int = 3
) -> Path:
    """Writes a whole GGUF file and returns its path."""
    path.write_bytes(gguf_bytes(metadata, tensors, version))
    return path


def gguf_bytes(
    metadata: Mapping[str, object], tensors: Mapping[str, Stored], version: int = 3
) -> bytes:
    """The bytes of a whole GGUF file; ValueError for what the format cannot hold."""
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int):
        raise ValueError("general.alignment is a number")
    infos, data = [], b""
    for name, (kind, values) in tensors.items():
        data += b"\0" * (-len(data) % alignment)
        infos.append(info(name, values.shape, TYPE_CODES[kind], len(data)))
        data += encode(kind, values)
    keys = [entry(key, *_value(value)) for key, value in metadata.items()]
    return assemble(keys, infos, data, version=version, alignment=alignment)


def encode(kind: str, values: Tensor) -> bytes:
    """The stored bytes of `values`, whose rows must be whole blocks."""
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        return bytes(values.to(dtype).contiguous().view(torch.uint8).numpy())
    if values.shape[-1] % 32:
        raise ValueError(f"{kind} holds rows of whole blocks of 32")
    blocks = values.float().reshape(-1, 32).numpy()
    return {"Q8_0": _encode_q8_0, "Q4_0": _encode_q4_0, "Q4_1": _encode_q4_1}[kind](blocks)


def assemble(
    keys: Sequence[bytes],
    infos: Sequence[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
    alignment: int = ALIGNMENT,
) -> bytes:
    """A file from its pieces, with counts that may lie."""
    counts = (
        len(infos) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return header + b"\0" * (-len(header) % alignment) + data


def string(text: str | bytes, length: int | None = None) -> bytes:
    """A string, with a length that may lie."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(key: str | bytes, code: int, payload: bytes) -> bytes:
    """A metadata entry: key, type, and the value's bytes."""
    return string(key) + struct.pack("<I", code) + payload


def array(code: int, count: int, payload: bytes = b"") -> bytes:
    """The bytes of an array value, with a count that may lie."""
    return struct.pack("<IQ", code, count) + payload


def info(name: str, shape: Sequence[int], code: int, offset: int, rank: int | None = None) -> bytes:
    """A tensor's description; `shape` in torch's order."""
    dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    rank_bytes = struct.pack("<I", len(shape) if rank is None else rank)
    return string(name) + rank_bytes + dimensions + struct.pack("<IQ", code, offset)


def _value(value: object) -> tuple[int, bytes]:
    if isinstance(value, list):
        if not value:
            return ARRAY, array(U32, 0)
        codes, payloads = zip(*map(_value, value), strict=True)
        if len(set(codes)) != 1:
            raise ValueError("the elements of an array are of one type")
        return ARRAY, array(codes[0], len(value), b"".join(payloads))
    if isinstance(value, str):
        return STRING, string(value)
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, int):
        return (U32, struct.pack("<I", value)) if value >= 0 else (5, struct.pack("<i", value))
    raise ValueError(f"no metadata type holds {value!r}")


def _encode_q8_0(blocks: np.ndarray) -> bytes:
    scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.clip(np.rint(_ratio(blocks, scale)), -127, 127).astype(np.int8)
    return np.concatenate([_bytes(scale), _bytes(numbers)], 1).tobytes()


def _encode_q4_0(blocks: np.ndarray) -> bytes:
    scale = (np.abs(blocks).max(1, keepdims=True) / 7).astype(np.float16)
    numbers = np.clip(np.rint(_ratio(blocks, scale)) + 8, 0, 15).astype(np.uint8)
    return np.concatenate([_bytes(scale), _pack(numbers)], 1).tobytes()


def _encode_q4_1(blocks: np.ndarray) -> bytes:
    low = blocks.min(1, keepdims=True).astype(np.float16)
    scale = ((blocks.max(1, keepdims=True) - low) / 15).astype(np.float16)
    numbers = np.clip(np.rint(_ratio(blocks - low, scale)), 0, 15).astype(np.uint8)
    return np.concatenate([_bytes(scale), _bytes(low), _pack(numbers)], 1).tobytes()


def _ratio(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scale = scale.astype(np.float32)
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _pack(numbers: np.ndarray) -> np.ndarray:
    return numbers[:, :16] | numbers[:, 16:] << 4


def block_bytes(kind: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor of that shape takes."""
    per_block = {"F32": 4, "F16": 2, "BF16": 2, "Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    return prod(shape) // (32 if kind.startswith("Q") else 1) * per_block
