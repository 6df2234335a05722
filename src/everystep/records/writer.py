"""The writer of a record: it appends lines, so that a killed program loses the last few at most."""

from __future__ import annotations

import gzip
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from os import PathLike
from pathlib import Path

from everystep._version import __version__
from everystep.files.atomic import require_writable
from everystep.files.opening import as_path
from everystep.records.record_lines import VERSION, Line, encoded
from everystep.records.redaction import redacted_line

MOST_BYTES = 2**31 - 2**20
"""Bytes of a record at most, before compression, fewer than a reader takes; then one line says that
the rest is left out."""
MOST_HELD = 128
"""Rows of scores that wait to be written at most, all steps together."""
_BLOCK = 2**16
_LEVEL = 4
"""How hard gzip tries: level 6 takes twice the time for a twentieth of the bytes."""


class RecordWriter:
    """A file that gets lines from any thread, compressed by gzip where its name ends in .gz.

    The file is made, or emptied, with the first line. It is closed between two writes, so that
    nothing is left open whatever becomes of a run. Lines that are handed over wait for those behind
    them, compressed ones until there are 64 kB of them or a run ends; each block of these can be
    read by itself. Where the file cannot be written, a warning says so once, and the record stops:
    the generation goes on. `redacted`: texts are left out before a line reaches the file, as by
    `redact_record`. `stages`: whether each choice has the scores that every processor left;
    without, it has logits and the scores that all of them left together. `known`: ids that it
    spells.
    """

    def __init__(
        self, path: str | PathLike[str], *, redacted: bool = False, stages: bool = True
    ) -> None:
        self.path, self.redacted, self.stages = as_path(path), redacted, stages
        require_writable(self.path)
        self.known: set[int] = set()
        self._lock = threading.RLock()
        self._runs = 0
        self._bytes = 0
        self._stopped = False
        self._waiting: list[bytes] = []
        self._beside: ThreadPoolExecutor | None = None
        self._handed: deque[tuple[Callable[[], None], int]] = deque()
        self._held = 0  # the rows of these
        self._works = False  # the thread has them in hands
        self._less = threading.Condition(self._lock)
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
            if self.redacted:
                lines = [own for one in lines if (own := redacted_line(one)) is not None]
            data = b"".join(map(encoded, lines))
            self._bytes += len(data)
            if self._bytes > MOST_BYTES:
                self._stopped = True
                data = encoded({"type": "cut", "what": "the rest", "bytes": MOST_BYTES})
            self._waiting.append(data)
            gathers = self._compressed or bool(self._handed)
            if not gathers or sum(map(len, self._waiting)) > _BLOCK or self._stopped:
                self._flush()

    def later(self, write: Callable[[], None], size: int = 1) -> None:
        """Call `write` beside the caller's own work, after what was handed over before; an error of
        it ends the record.

        `size`: how many rows of scores it holds; where many are held, the caller waits.
        """
        if self._stopped:
            return
        with self._lock:
            self._handed.append((write, size))
            self._held += size
            self._begin()
            while self._held > MOST_HELD:
                self._less.wait()

    def _begin(self) -> None:
        """Have the thread write what was handed over, unless it does."""
        if self._works or not self._handed:
            return
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, "everystep-record")
        self._beside.submit(self._write_handed)
        self._works = True

    def _write_handed(self) -> None:
        """Write all that was handed over, until nothing is left."""
        while True:
            with self._lock:
                if not self._handed:
                    if not self._compressed:
                        self._flush()
                    self._works = False
                    self._less.notify_all()
                    return
                write, size = self._handed[0]
            try:
                write()
            except Exception as error:
                self.stop(error)
            with self._lock:
                self._handed.popleft()
                self._held -= size
                self._less.notify_all()
            time.sleep(0)  # whoever takes steps may wait for the interpreter

    def settle(self) -> None:
        """Wait until everything that was handed over is written; an interrupt leaves it there."""
        with self._lock:
            self._begin()
            while self._works:
                self._less.wait()

    def flush(self) -> None:
        """Let everything that was handed over or written be in the file."""
        self.settle()
        self._flush()

    def _flush(self) -> None:
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
        file.write(gzip.compress(data, _LEVEL, mtime=0) if path.suffix == ".gz" else data)
    waiting.clear()
