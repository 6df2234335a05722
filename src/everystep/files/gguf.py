"""A GGUF file: its metadata, and its tensors as blocks or as values.

The file is mapped and stays on disk until a tensor is used; blocks are views of the map, values are
copies. The map is private, so nothing that is done to a view reaches the file. A file that somebody
truncates while it is mapped ends the process, as with every memory map: replace model files, never
rewrite them. Which key or tensor a model needs is not known here.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from everystep.errors import FormatError, UnsupportedError, nearest
from everystep.files.gguf_blocks import SUPPORTED, decode_blocks
from everystep.files.gguf_header import GgufTensor, read_header
from everystep.files.gguf_parts import part_names
from everystep.files.opening import as_path, open_regular, size_of


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file; it is closed when neither it nor a view of its blocks is in use."""

    path: Path
    metadata: dict[str, object]
    tensors: dict[str, GgufTensor]
    data: Tensor
    """The whole file, uint8."""
    mapped: mmap.mmap
    elsewhere: Mapping[str, GgufFile] = field(default_factory=dict)
    """Of a split model: which other part holds a tensor that this one does not."""

    def blocks(self, name: str) -> Tensor:
        """Return the stored bytes of a tensor, uint8 (..., bytes of a row): a view, nothing is
        copied.

        Raises FormatError for no such tensor, UnsupportedError for a format that cannot be decoded.
        """
        tensor = self._tensor(name)
        block = tensor.block
        if block.decode is None:
            raise UnsupportedError(
                f"{self.path}: tensor {name!r} is stored as {block.name}",
                wanted=", ".join(SUPPORTED),
                do="Convert the model to one of these, for example Q8_0",
            )
        row = tensor.shape[-1] // block.elements * block.nbytes
        part = self.elsewhere.get(name, self)
        return part.data[tensor.offset : tensor.end].view(*tensor.shape[:-1], row)

    def dequantise(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the exact values of a tensor, rounded to `dtype`, in memory of their own.

        Raises what `blocks` raises.
        """
        stored, tensor = self.blocks(name).view(-1), self.tensors[name]
        return decode_blocks(tensor.block, stored, dtype).view(tensor.shape)

    def release(self, name: str) -> None:
        """Frees the memory that shows the tensor; the next look at it reads the file again.

        Changes made through a view of its blocks may be lost. Raises FormatError for no such
        tensor.
        """
        tensor = self._tensor(name)
        if hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
            part = self.elsewhere.get(name, self)
            part.mapped.madvise(mmap.MADV_DONTNEED, start, tensor.end - start)

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self.tensors:
            close = nearest(name, self.tensors)
            do = f"The nearest name is {close!r}" if close else None
            raise FormatError(f"{self.path} holds no tensor {name!r}", do=do)
        return self.tensors[name]


def read_gguf(path: str | PathLike[str]) -> GgufFile:
    """Opens a GGUF file of version 2 or 3 after checking all of its header.

    Of a model that is split, any part may be named; all are opened, and the metadata are those of
    the first. Raises MissingFileError (the file, or a part), FileError (not a regular file),
    FormatError, and UnsupportedError (a version).
    """
    path = as_path(path)
    opened = _opened(path)
    count = opened.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return opened
    names = part_names(path.name)
    if names is None or len(names) != count:
        raise FormatError(
            f"{path}: this is one of the parts of a split model, and its name is not",
            wanted=f"a name that ends in -00001-of-{count:05}.gguf",
            got=path.name,
            do="Give the parts the names that they were written under",
        )
    others = (path.with_name(name) for name in names)
    return _joined([opened if one == path else _opened(one) for one in others])


def _joined(parts: list[GgufFile]) -> GgufFile:
    """Return the first of a model's parts, with the tensors of all."""
    first, *others = parts
    tensors, elsewhere = dict(first.tensors), {}
    for number, part in enumerate(parts):
        given = part.metadata.get("split.no"), part.metadata.get("split.count")
        if given != (number, len(parts)):
            wanted = f"part {number} of {len(parts)}, counted from 0"
            raise FormatError(f"{part.path}: the parts are mixed up", wanted=wanted, got=given)
    for part in others:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise FormatError(f"{part.path}: the tensor {name!r} is in another part too")
            tensors[name], elsewhere[name] = tensor, part
    stated = first.metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        what = f"{first.path}: the parts do not hold all tensors of the model"
        raise FormatError(what, wanted=stated, got=len(tensors))
    return replace(first, tensors=tensors, elsewhere=elsewhere)


def _opened(path: Path) -> GgufFile:
    """One file, a part of a model or all of it."""
    with open_regular(path) as file:
        if size_of(file) == 0:
            raise FormatError(f"{path}: the file is empty.")
        # Copy on write: torch has no read-only tensors, and the file must never change.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata, tensors = read_header(memoryview(mapped), str(path))
    data = torch.frombuffer(mapped, dtype=torch.uint8)
    return GgufFile(path, metadata, tensors, data, mapped)
