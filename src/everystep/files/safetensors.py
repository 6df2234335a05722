"""The weights of a model folder: one safetensors file, or several and their index.

Everything is checked when the folder is opened: every header against its file, every shard and
tensor against the index; the `safetensors` library judges whether a file contradicts itself. A
folder that opens is whole. A tensor's bytes are read when it is asked for, not mapped: mapped pages
would count as memory beside the model that is made of them. Which tensors a model needs is not
known here. Pickled weights can run code and are never read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from everystep.errors import (
    FileError,
    FormatError,
    MissingFileError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.files.opening import as_path, impostor, is_there, open_regular, read_bounded, size_of
from everystep.files.strict_json import field, parse_object

MAX_HEADER_BYTES = 64 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_NAME_LENGTH = 512

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.npz", "*.msgpack")
# A plain name in the same folder, under the rules of every system: no separator, drive or parent.
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, `nbytes` from `start` on, and its description in the header."""

    file: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_bytes(stored: StoredTensor) -> np.ndarray:
    """Read the bytes of a tensor, fewer where the file ends before.

    Not by `numpy.fromfile`: it asks what kind of file it was given and makes a SystemError of an
    interrupt meanwhile.
    """
    data, count = np.empty(stored.nbytes, np.uint8), 0
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.start)
        while count < stored.nbytes and (more := file.readinto(data.data[count:])):
            count += more
    return data[:count]


class Weights:
    """The tensors of an opened folder, by name."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        """Return the names of all tensors, in the files' order."""
        return list(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor; FormatError when there is none of that name."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor is stored in; FormatError when there is none of that
        name."""
        return self._stored(name).dtype

    def load(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor's values, in `dtype` if given and as stored otherwise."""
        return self._read(name, self._stored(name), dtype)

    def load_rows(
        self, name: str, first: int, end: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a copy of some rows of a tensor; no others are read."""
        stored = self._stored(name)
        size = stored.nbytes // max(1, stored.shape[0])
        start, shape = stored.start + first * size, (end - first, *stored.shape[1:])
        rows = replace(stored, start=start, nbytes=(end - first) * size, shape=shape)
        return self._read(name, rows, dtype)

    def _read(self, name: str, stored: StoredTensor, dtype: torch.dtype | None) -> Tensor:
        try:
            data = stored_bytes(stored)
        except OSError as error:
            raise FileError(f"{stored.file}: {name!r} cannot be read", got=error) from error
        if len(data) != stored.nbytes:
            what = f"{stored.file}: {name!r} was cut off while it was in use"
            raise FormatError(what, wanted=f"{stored.nbytes} bytes", got=len(data))
        empty = torch.empty(
            stored.shape, dtype=stored.dtype
        )  # bytes without any have no other type
        tensor = (
            torch.from_numpy(data).view(stored.dtype).reshape(stored.shape) if len(data) else empty
        )
        return tensor if dtype is None else tensor.to(dtype)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            close = nearest(name, self._tensors)
            do = f"The nearest name is {close!r}" if close else None
            raise FormatError(f"the weights hold no tensor {name!r}", do=do)
        return self._tensors[name]


def open_weights(folder: str | PathLike[str], stem: str = "model") -> Weights:
    """Opens `stem`.safetensors of a folder, or the shards that `stem`.safetensors.index.json names.

    Where both exist the single file counts, as in transformers. Raises MissingFileError,
    FormatError (also for pickled weights, with how to convert them) and UnsupportedError (a type of
    numbers that is not known).
    """
    folder = as_path(folder)
    single = folder / f"{stem}.safetensors"
    index = folder / f"{stem}.safetensors.index.json"
    if is_there(single):
        return Weights(_read_header(single))
    if is_there(index):
        return Weights(_read_sharded(folder, index))
    raise _no_weights(folder, stem)


def read_file(file: Path) -> tuple[Weights, dict[str, str]]:
    """Read the tensors of one file, and its metadata; errors as for `open_weights`."""
    found = Weights(_read_header(file))
    metadata = parse_object(_header_bytes(file), str(file)).get("__metadata__", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{file}: the metadata are not an object", got=shown(metadata)[:80])
    return found, {name: str(value) for name, value in metadata.items()}


def _no_weights(folder: Path, stem: str) -> FormatError | MissingFileError:
    wanted = f"{stem}.safetensors or {stem}.safetensors.index.json"
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return missing_in(folder, "holds no weights", wanted)
    return FormatError(
        f"{folder} holds only weights that can run code when they are read",
        wanted=wanted,
        got=", ".join(pickles[:3]),
        do="If you trust them, convert with transformers: AutoModelForCausalLM"
        ".from_pretrained(folder).save_pretrained(new_folder)",
    )


def missing_in(folder: Path, what: str, wanted: str) -> MissingFileError:
    """Return the error of a folder without the files `wanted`, or of no folder at all."""
    if not folder.is_dir():
        return MissingFileError(f"there is no folder {folder}.")
    ggufs = sorted(folder.glob("*.gguf"))
    do = f"Give the path of the file itself: {ggufs[0]}" if ggufs else None
    return MissingFileError(f"{folder} {what}", wanted=wanted, do=do)


def _read_sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    placed = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in dict.fromkeys(placed.values()):
        file = folder / shard
        if not file.exists():
            raise MissingFileError(
                f"{index} names {shard}, which is missing", do="Fetch the model again"
            )
        found = _read_header(file)
        listed = {name for name, where in placed.items() if where == shard}
        _refuse_names(f"{index} names tensors that are not in {shard}", listed - {*found})
        _refuse_names(f"{index} does not name all tensors of {shard}", {*found} - listed)
        tensors.update(found)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    content = parse_object(read_bounded(index, MAX_INDEX_BYTES), str(index))
    weight_map = field(content, "weight_map", dict, str(index))
    if not weight_map:
        raise FormatError(f"{index}: the field 'weight_map' is empty.")
    for name, shard in weight_map.items():
        # The name is a stranger's and becomes a path: it must not lead out of the folder.
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            raise FormatError(
                f"{index}: {name!r} is said to be in an impossible file",
                wanted="the name of a .safetensors file in the same folder",
                got=shown(shard)[:120],
            )
    return weight_map


def _refuse_names(what: str, names: set[str], count: int = 5) -> None:
    if names:
        rest = f" and {len(names) - count} more" if len(names) > count else ""
        got = ", ".join(map(repr, sorted(names)[:count])) + rest
        raise FormatError(what, got=got)


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """Read the tensors of one file, whose places in it the library has checked."""
    described = _header_bytes(file)
    header = parse_object(described, str(file))
    header.pop("__metadata__", None)
    data = 8 + len(described)
    tensors = {name: _stored_tensor(file, data, name, entry) for name, entry in header.items()}
    try:
        with safe_open(str(file), framework="pt"):
            return tensors
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{file} contradicts itself: {error}.") from error


def _header_bytes(file: Path) -> bytes:
    with open_regular(file) as opened:
        size = size_of(opened)
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        limit = min(size - 8, MAX_HEADER_BYTES)
        if len(start) == 8 and 2 <= length <= limit:
            return opened.read(length)
        known = impostor(start + opened.read(56))
    if known is not None:
        raise FormatError(f"{file} is {known}.")
    raise FormatError(
        f"{file} is not a safetensors file or was cut off",
        wanted=f"a header of 2 to {max(limit, 0)} bytes",
        got=f"{length} in a file of {size} bytes",
    )


def _stored_tensor(file: Path, data: int, name: str, entry: object) -> StoredTensor:
    where = f"{file}: {name[:MAX_NAME_LENGTH]!r}"
    if not 0 < len(name) <= MAX_NAME_LENGTH:
        raise FormatError(
            f"{where} is no tensor's name", wanted=f"1 to {MAX_NAME_LENGTH} characters"
        )
    if not isinstance(entry, dict):
        raise FormatError(f"{where} is not described by an object", got=shown(entry)[:80])
    code = field(entry, "dtype", str, where)
    shape = field(entry, "shape", list, where)
    offsets = field(entry, "data_offsets", list, where)
    if code not in DTYPES:
        do = "Programs that quantise store codes so: load the model that they were made from"
        wanted = ", ".join(DTYPES)
        raise UnsupportedError(f"{where} is of an unknown type", wanted=wanted, got=code, do=do)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise FormatError(f"{where} has an impossible shape", got=shape)
    if len(offsets) != 2 or not all(type(offset) is int and offset >= 0 for offset in offsets):
        raise FormatError(
            f"{where} has impossible offsets", wanted="two counts of bytes", got=offsets
        )
    start, end = offsets
    return StoredTensor(file, data + start, end - start, tuple(shape), DTYPES[code])
