"""Lines of a record that stay compressed, since what a short line says may take much memory."""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import overload

_PACKED = 2**16
"""Bytes of memory of lines that are compressed together, at least."""
_OBJECT = 48
"""Bytes of memory of a line beside its own."""
Json = object


class PackedLines:
    """The lines of steps, compressed by blocks, of which the one asked for last is unpacked.

    A step of one row takes about a third of a kilobyte here, and 17 as objects.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []  # the place of each block's first line
        self._blocks: list[bytes] = []
        self._open: list[bytes] = []
        self._count = self._size = 0
        self._unpacked: tuple[int, list[Mapping[str, Json]]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    def add(self, data: bytes) -> int:
        """Keep a line that is an object of JSON, and return its place."""
        self._open.append(data)
        self._count, self._size = self._count + 1, self._size + len(data) + _OBJECT
        if self._size > _PACKED:
            self._firsts.append(self._count - len(self._open))
            self._blocks.append(zlib.compress(b",".join(self._open), 1))
            self._open, self._size = [], 0
        return self._count - 1

    def line(self, place: int) -> Mapping[str, Json]:
        """Return the line at a place."""
        first = self._count - len(self._open)
        if place >= first:
            found: Mapping[str, Json] = json.loads(self._open[place - first])
            return found
        block = bisect_right(self._firsts, place) - 1
        unpacked = self._unpacked  # another thread may put another block there
        if unpacked[0] != block:
            text = zlib.decompress(self._blocks[block])
            unpacked = block, json.loads(b"[%b]" % text)
            self._unpacked = unpacked
        return unpacked[1][place - self._firsts[block]]


class KeptLines(Sequence[Mapping[str, Json]]):
    """Lines in the order in which they came, each unpacked when it is asked for.

    It equals any sequence of the same lines.
    """

    def __init__(self) -> None:
        self._lines = PackedLines()

    def __repr__(self) -> str:
        return f"<{len(self)} lines>"

    def add(self, data: bytes) -> None:
        """Keep a line that is an object of JSON."""
        self._lines.add(data)

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, place: int) -> Mapping[str, Json]: ...
    @overload
    def __getitem__(self, place: slice) -> list[Mapping[str, Json]]: ...
    def __getitem__(self, place: int | slice) -> Mapping[str, Json] | list[Mapping[str, Json]]:
        places = range(len(self))[place]  # with Python's own error for a place that is not there
        if isinstance(places, range):
            return [self._lines.line(one) for one in places]
        return self._lines.line(places)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        same = (one == another for one, another in zip(self, other, strict=False))
        return len(self) == len(other) and all(same)

    __hash__ = None  # type: ignore[assignment]  # it grows
