"""The writer of a record: it appends lines, so that a killed program loses the last one at most."""

from __future__ import annotations

import gzip
import threading
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from os import PathLike
from pathlib import Path

from everystep._version import __version__
from everystep.files.atomic import require_writable
from everystep.files.opening import as_path
from everystep.records.record_lines import VERSION, Line, encoded

MOST_BYTES = 2**30
"""Bytes of a record at most, before compression; then one line says that the rest is left out."""
_BLOCK = 2**16


class RecordWriter:
    """A file that gets lines from any thread, compressed by gzip where its name ends in .gz.

    The file is made, or emptied, with the first line. It is closed between two writes, so that
    nothing is left open whatever becomes of a run. Compressed lines wait until there are 64 kB of
    them or a run ends; each block can be read by itself. Where the file cannot be written, a
    warning says so once, and the record stops: the generation goes on. `known`: ids that it spells.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = as_path(path)
        require_writable(self.path)
        self.known: set[int] = set()
        self._lock = threading.RLock()
        self._runs = 0
        self._bytes = 0
        self._stopped = False
        self._waiting: list[bytes] = []
        self._compressed = self.path.suffix == ".gz"
        weakref.finalize(self, _append_left, self.path, self._waiting)

    def __repr__(self) -> str:
        return f"RecordWriter({str(self.path)!r})"

    def begin(self, model: str, tokenizer: str) -> str:
        """Return the id of a new run; with the first one the file begins."""
        with self._lock:
            name, self._runs = str(self._runs), self._runs + 1
            if name == "0":
                self._write_new()
                first = {"type": "record", "version": VERSION, "everystep": __version__}
                self.write([{**first, "model": model, "tokenizer": tokenizer}])
            return name

    def write(self, lines: Iterable[Line]) -> None:
        """Append lines, all of them at once."""
        with self._lock:
            if self._stopped:
                return
            data = b"".join(map(encoded, lines))
            self._bytes += len(data)
            if self._bytes > MOST_BYTES:
                self._stopped = True
                data = encoded({"type": "cut", "what": "the rest", "bytes": MOST_BYTES})
            self._waiting.append(data)
            if not self._compressed or sum(map(len, self._waiting)) > _BLOCK or self._stopped:
                self.flush()

    def flush(self) -> None:
        """Let everything that was written be in the file."""
        with self._lock:
            try:
                _append_waiting(self.path, self._waiting)
            except OSError as error:
                self.stop(error)

    def _write_new(self) -> None:
        try:
            self.path.write_bytes(b"")
        except OSError as error:
            self.stop(error)

    def stop(self, error: Exception) -> None:
        """Write nothing more, and say why."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._waiting.clear()
                what = f"the record {self.path} stops here, as it cannot be written: {error}"
                with suppress(UserWarning):  # where warnings are errors, the step goes on too
                    warnings.warn(what, stacklevel=2)


def record_writer(file: object) -> RecordWriter:
    """Return the writer of a file, made with its first line; a writer itself as it is.

    RequestError for what is no path, and errors where no file can be written there.
    """
    return file if isinstance(file, RecordWriter) else RecordWriter(file)  # type: ignore[arg-type]


def _append_left(path: Path, waiting: list[bytes]) -> None:
    """Append what still waits when nobody writes any more, if that can be."""
    with suppress(OSError):
        _append_waiting(path, waiting)


def _append_waiting(path: Path, waiting: list[bytes]) -> None:
    """Append what waits to the file, as one block."""
    data = b"".join(waiting)
    if not data:
        return
    with path.open("ab", buffering=0) as file:
        file.write(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    waiting.clear()
