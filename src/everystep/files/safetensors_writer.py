"""Writing tensors as safetensors: one file, or shards of a limited size and their index.

Tensors come one by one and are written as they come, so that no more than one of them is held.
Their names, shapes and types have to be known before, since the headers say how large each is.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.files.safetensors import DTYPES

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes that its values take."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    entries: Sequence[Entry],
    tensors: Iterable[Tensor],
    most_bytes: int | None = None,
    stem: str = "model",
) -> None:
    """Write `stem`.safetensors, or shards of at most `most_bytes` and their index, into the folder.

    `tensors`: the values of the entries, in their order. A tensor that is larger than a shard may
    be has one to itself. Files that are there are not replaced: FileExistsError.
    """
    shards = _shards(entries, most_bytes)
    values = iter(tensors)
    names = [f"{stem}-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [f"{stem}.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        _write_file(folder / name, shard, values)
    if len(shards) > 1:
        _write_index(folder, dict(zip(names, shards, strict=True)), stem)


def write_some(
    folder: Path, entries: Sequence[Entry], tensors: Iterable[Tensor], number: int, count: int
) -> None:
    """Write one of `count` files of about equal size that hold all entries together, and with the
    first of them their index; `tensors`: the values of all entries, of which some are used."""
    most = -(-sum(one.nbytes for one in entries) // count)
    shards: list[list[Entry]] = [[] for _ in range(count)]
    size = 0
    for one in entries:
        shards[min(size // most, count - 1)].append(one)
        size += one.nbytes
    held = [shard for shard in shards if shard]
    names = [f"model-{i:05}-of-{len(held):05}.safetensors" for i in range(1, len(held) + 1)]
    if number == 0:
        _write_index(folder, dict(zip(names, held, strict=True)), "model")
    if number < len(held):
        first = sum(map(len, held[:number]))
        own = islice(tensors, first, first + len(held[number]))
        _write_file(folder / names[number], held[number], own)


def _write_index(folder: Path, files: Mapping[str, Sequence[Entry]], stem: str) -> None:
    weight_map = {one.name: name for name, entries in files.items() for one in entries}
    total = sum(one.nbytes for entries in files.values() for one in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def is_of_weights(name: str, stem: str = "model") -> bool:
    """Return True for a name that `write_weights` may give a file."""
    own = re.escape(stem)
    shard = rf"{own}(-\d{{5}}-of-\d{{5}})?\.safetensors"
    return re.fullmatch(rf"{shard}|{own}\.safetensors\.index\.json", name) is not None


def _shards(entries: Sequence[Entry], most_bytes: int | None) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for one in entries:
        if shards[-1] and most_bytes is not None and size + one.nbytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += one.nbytes
    return shards


def _write_file(path: Path, entries: Sequence[Entry], values: Iterable[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for one in entries:
        start, stop = stop, stop + one.nbytes
        described = {"dtype": _CODES[one.dtype], "shape": one.shape, "data_offsets": (start, stop)}
        header[one.name] = described
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that numbers of 8 bytes lie on their boundaries
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one, tensor in zip(entries, values, strict=False):
            if (tuple(tensor.shape), tensor.dtype) != (one.shape, one.dtype):
                raise InvariantError(f"{one.name} is not what was announced")
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            file.write(raw.numpy().data)
        if file.tell() != 8 + len(text) + stop:
            raise InvariantError(f"{path.name} lacks some of its tensors")
        file.flush()
        os.fsync(file.fileno())
