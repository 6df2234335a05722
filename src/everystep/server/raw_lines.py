"""The lines of a file as bytes. It imports next to nothing, for the tasks that only read lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

LONGEST = 32 << 20
"""Bytes of a line at most, as of a body over HTTP."""


def raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank; a longer one than is read comes cut."""
    while raw := file.readline(LONGEST + 1):
        if raw.strip():
            yield raw
        if len(raw) > LONGEST:
            return
