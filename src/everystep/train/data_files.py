"""Where examples come from: JSONL and Parquet files, data sets of others, lists and iterables."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from everystep.errors import FormatError, MissingExtraError, RequestError, UnsupportedError
from everystep.files.opening import as_path, impostor, open_regular, size_of
from everystep.files.strict_json import MAX_JSON_BYTES, parse_object

MAX_DATA_BYTES = 4 << 30
"""Of a file of examples."""
MAX_EXAMPLES = 1_000_000
"""Of an iterable without a length, which is read into memory."""
_PARQUET = (b"PAR1", b"PARE")


@runtime_checkable
class Indexed(Protocol):
    """A data set whose examples are taken by number, as those of the library datasets are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


DataLike = str | os.PathLike[str] | Indexed | Iterable[object]


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples that can be taken by number.

    `fixed`: they lie in memory, so that one is the same whenever it is taken. Those of a data set
    of others may be made anew each time.
    """

    items: Indexed
    fixed: bool

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]

    def __repr__(self) -> str:
        kind = "in memory" if self.fixed else f"of a {type(self.items).__name__}"
        return f"Examples({len(self)} {kind})"


def read_examples(data: DataLike, *, most: int = MAX_EXAMPLES) -> Examples:
    """Return the examples of a file, of a data set, or of an iterable.

    A path ends in .jsonl (an object on each line) or .parquet (the extra 'train'). What has a
    length and takes numbers, such as a `datasets.Dataset`, is asked for an example each time it is
    needed. Another iterable is read once, into memory, up to `most` examples. FormatError names
    the line of a broken file; RequestError for what holds no examples.

    Example:

        >>> len(es.read_examples([{"text": "One."}, {"text": "Two."}]))
        2
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, str | os.PathLike):
        found = Examples(_read_file(as_path(data)), fixed=True)
    elif isinstance(data, Mapping):
        raise _of_several(data)
    elif isinstance(data, list | tuple):
        found = Examples(tuple(data), fixed=True)
    elif hasattr(data, "iloc"):
        do = "Pass data.to_dict('records')"
        raise RequestError("a table is taken by columns", got=type(data).__name__, do=do)
    elif isinstance(data, Indexed) and not isinstance(data, bytes):
        found = Examples(data, fixed=False)
    else:
        found = Examples(_read_iterable(data, most), fixed=True)
    if not len(found):
        raise RequestError("there are no examples", got=type(data).__name__, do="Pass at least one")
    return found


def _of_several(data: Mapping[object, object]) -> RequestError:
    """Return the error of a mapping: data sets by name, or columns."""
    names = ", ".join(map(str, data))
    first = next(iter(data), "train")
    columns = any(isinstance(one, list | tuple) for one in data.values())
    what = "these are columns" if columns else "these are several data sets"
    do = "Pass a list with a mapping for each example" if columns else f"Pass data[{first!r}]"
    return RequestError(what, wanted="examples, one after another", got=names, do=do)


def _read_iterable(data: object, most: int) -> tuple[object, ...]:
    if not isinstance(data, Iterable) or isinstance(data, bytes):
        do = "Pass the path of a .jsonl file, a list of mappings, or a data set"
        raise RequestError("this is no data", wanted="examples", got=type(data).__name__, do=do)
    found = tuple(islice(data, most + 1))
    if len(found) > most:
        raise RequestError(
            "an iterable without a length goes on for too long to be read into memory",
            wanted=f"at most {most} examples",
            do="Pass a data set with a length, or itertools.islice of it",
        )
    return found


def _read_file(path: Path) -> Sequence[object]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        wanted = " or ".join(_READERS)
        do = "Write an object on each line of a .jsonl file; data sets of a hub are not fetched"
        got = path.suffix or path.name
        raise UnsupportedError(f"{path} is of no known kind", wanted=wanted, got=got, do=do)
    return reader(path)


def _read_lines(path: Path) -> tuple[object, ...]:
    """Return the objects on the lines of a file; FormatError with the number of a broken line."""
    found: list[object] = []
    with open_regular(path) as raw, io.BufferedReader(_raw(raw)) as file:
        _require_size(path, size_of(raw))
        while line := file.readline(MAX_JSON_BYTES + 1):
            where = f"{path}, line {len(found) + 1}"
            if len(line) > MAX_JSON_BYTES:
                raise FormatError(f"{where} is too long", wanted=f"at most {MAX_JSON_BYTES} bytes")
            if not line.strip():
                if file.read().strip():
                    raise FormatError(f"{where} is empty", do="Take empty lines out of the file")
                break
            if not found and (other := impostor(line[:64])):
                raise FormatError(f"{path} is {other}")
            found.append(parse_object(line, where))
    return tuple(found)


def _raw(file: object) -> io.RawIOBase:
    if not isinstance(file, io.RawIOBase):
        raise FormatError("this file cannot be read line by line", got=type(file).__name__)
    return file


def _read_parquet(path: Path) -> tuple[object, ...]:
    with open_regular(path) as file:
        size, begin = size_of(file), file.read(4)
    _require_size(path, size)
    if begin not in _PARQUET:
        raise FormatError(f"{path} is no Parquet file", wanted="PAR1 at its beginning", got=begin)
    try:
        library: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        do = "write the examples into a .jsonl file"
        raise MissingExtraError.of(f"reading {path}", "pyarrow", "train", do=do) from error
    try:
        return tuple(library.read_table(str(path)).to_pylist())
    except Exception as error:  # it fails in many ways, all of them the file's fault
        raise FormatError(f"{path} cannot be read: {error}") from error


def _require_size(path: Path, size: int) -> None:
    if size > MAX_DATA_BYTES:
        wanted, do = f"at most {MAX_DATA_BYTES} bytes", "Split it, or pass a data set"
        raise FormatError(f"{path} is too large", wanted=wanted, got=size, do=do)


_READERS = {".jsonl": _read_lines, ".parquet": _read_parquet}
"""Ends of names -> what reads such files."""
