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
TYPE_CODES = {
    "F32": 0,
    "F16": 1,
    "BF16": 30,
    "F64": 28,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q6_K": 14,
}

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

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
    if kind in _PLAIN:
        return bytes(values.to(_PLAIN[kind]).contiguous().view(torch.uint8).numpy())
    size = 256 if kind.endswith("_K") else 32
    if values.shape[-1] % size:
        raise ValueError(f"{kind} holds rows of whole blocks of {size}")
    return _ENCODERS[kind](values.float().reshape(-1, size).numpy())


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


def _encode_q4_k(blocks: np.ndarray) -> bytes:
    parts = blocks.reshape(-1, 8, 32)
    low = np.maximum(-parts.min(2), 0)
    scales = (parts.max(2) + low) / 15
    d, dmin = (_shared(one, 63) for one in (scales, low))
    small = np.rint(_ratio(scales, d)).clip(0, 63).astype(np.uint8)
    mins = np.rint(_ratio(low, dmin)).clip(0, 63).astype(np.uint8)
    lifted = parts + (dmin.astype(np.float32) * mins)[..., None]
    codes = _ratio(lifted, (d.astype(np.float32) * small)[..., None])
    runs = np.rint(codes).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        small[:, :4] | small[:, 4:] >> 4 << 6,
        mins[:, :4] | mins[:, 4:] >> 4 << 6,
        small[:, 4:] & 15 | mins[:, 4:] << 4,
        (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(-1, 128),
    ]
    return np.concatenate([_bytes(d), _bytes(dmin), *packed], 1).tobytes()


def _encode_q6_k(blocks: np.ndarray) -> bytes:
    parts = blocks.reshape(-1, 16, 16)
    scales = np.abs(parts).max(2) / 31
    d = _shared(scales, 127)
    small = np.rint(_ratio(scales, d)).clip(0, 127).astype(np.int8)
    numbers = np.rint(_ratio(parts, (d.astype(np.float32) * small)[..., None])).clip(-32, 31)
    codes = (numbers + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = sum(codes[:, :, i] >> 4 << 2 * i for i in range(4))
    runs = [low.reshape(-1, 128), np.asarray(high, np.uint8).reshape(-1, 64), small.view(np.uint8)]
    return np.concatenate([*runs, _bytes(d)], 1).tobytes()


def _shared(scales: np.ndarray, most: int) -> np.ndarray:
    """The float16 (n, 1) that scales of parts are multiples of."""
    return (scales.max(1, keepdims=True) / most).astype(np.float16)


def _ratio(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    scale = np.broadcast_to(scale.astype(np.float32), values.shape)
    return np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)


def _bytes(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint8)


def _pack(numbers: np.ndarray) -> np.ndarray:
    return numbers[:, :16] | numbers[:, 16:] << 4


_ENCODERS = {
    "Q8_0": _encode_q8_0,
    "Q4_0": _encode_q4_0,
    "Q4_1": _encode_q4_1,
    "Q4_K": _encode_q4_k,
    "Q6_K": _encode_q6_k,
}


def block_bytes(kind: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor of that shape takes."""
    if kind in _PLAIN:
        return prod(shape) * _PLAIN[kind].itemsize
    elements, size = {
        "Q8_0": (32, 34),
        "Q4_0": (32, 18),
        "Q4_1": (32, 20),
        "Q4_K": (256, 144),
        "Q6_K": (256, 210),
    }[kind]
    return prod(shape) // elements * size
