"""Processes as Linux lists them, read while threads and files of theirs come and go."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def children_of(process: int) -> set[int]:
    """The processes that one has started, by any of its threads, and that have not ended."""
    return {int(one) for text in _read(process, "task", "children") for one in text.split()}


def descendants_of(process: int) -> set[int]:
    """The processes that one has started, and those that these have started."""
    found, waiting = set[int](), [process]
    while waiting:
        own = children_of(waiting.pop()) - found
        found |= own
        waiting += own
    return found


def command_of(process: int) -> bytes:
    """The command line of a process, with a zero byte after each word; empty if it has ended."""
    with suppress(OSError):
        return Path("/proc", str(process), "cmdline").read_bytes()
    return b""


def sockets_of(process: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    found = set()
    for one in _listed(process, "fd"):
        with suppress(OSError):  # it was closed meanwhile
            if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(one)):
                found.add(match[1])
    return found


def _read(process: int, folder: str, name: str) -> Iterator[str]:
    for one in _listed(process, folder):
        with suppress(OSError):  # it has ended meanwhile
            yield (one / name).read_text()


def _listed(process: int, folder: str) -> list[Path]:
    with suppress(OSError):
        return [*Path("/proc", str(process), folder).iterdir()]
    return []
