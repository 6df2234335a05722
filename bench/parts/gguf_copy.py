"""A GGUF file's model in another of the format's block types, for comparisons on one file.

Metadata are copied byte by byte; matrices are rounded from their float32 values by ggml's reference
rules, the rest stays as it is. A source of blocks is rounded a second time: good enough to compare
two engines on the same file, and named so in results.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch

from everystep.files.gguf import GgufFile, read_gguf

BLOCK_CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
_PLAIN = {"F32": np.float32, "F16": np.float16}
_ALIGNMENT = 32


def write_copy(source: Path, target: Path, kind: str) -> Path:
    """`target` holds the source's model; a table or head is Q8_0 where `kind` is Q4_0."""
    file = read_gguf(source)
    infos, blobs, offset = [], [], 0
    for name, tensor in file.tensors.items():
        form = _form(name, tensor.shape, kind)
        blob = encode(form, file.dequantise(name).numpy())
        infos.append(tensor_info(name, tensor.shape, BLOCK_CODES[form], offset))
        blobs.append(blob + bytes(-len(blob) % _ALIGNMENT))
        offset += len(blobs[-1])
    header = _metadata(file) + b"".join(infos)
    header += bytes(-len(header) % _ALIGNMENT)
    target.write_bytes(header + b"".join(blobs))
    return target


def encode(kind: str, values: np.ndarray) -> bytes:
    """The stored bytes of float32 values whose rows are whole blocks."""
    if kind == "BF16":
        return torch.from_numpy(values).bfloat16().view(torch.int16).numpy().tobytes()
    if kind in _PLAIN:
        return values.astype(_PLAIN[kind]).tobytes()
    blocks = values.reshape(-1, 32).astype(np.float32)
    return (_q8_0 if kind == "Q8_0" else _q4_0)(blocks).tobytes()


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    scaled = blocks * _inverse(scale)
    # Halves go away from zero.
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([_half(scale), codes.view(np.uint8)], 1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    far = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = far / np.float32(-8)
    codes = np.minimum(blocks * _inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    return np.concatenate([_half(scale), codes[:, :16] | codes[:, 16:] << 4], 1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    return np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)


def _half(scale: np.ndarray) -> np.ndarray:
    return scale.astype(np.float16).view(np.uint8)


def _form(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) != 2:
        return "F32"
    return "Q8_0" if kind == "Q4_0" and name in ("token_embd.weight", "output.weight") else kind


def tensor_info(name: str, shape: tuple[int, ...], code: int, offset: int) -> bytes:
    """A tensor as the header of a file describes it."""
    text = name.encode()
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return struct.pack("<Q", len(text)) + text + sizes + struct.pack("<IQ", code, offset)


def _metadata(file: GgufFile) -> bytes:
    """Everything before the description of the first tensor."""
    start = bytes(file.data[: min(tensor.offset for tensor in file.tensors.values())].numpy())
    ends = [start.index(tensor_info(name, (), 0, 0)[: 8 + len(name)]) for name in file.tensors]
    return start[: min(ends)]
