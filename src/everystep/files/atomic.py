"""Writing a file, or a folder of files, so that it is either whole or absent.

The bytes go to a new file beside the target, reach the disk, and only then take the target's name;
whatever ends the writing early, Ctrl-C included, removes them. A process that is killed outright
can still leave its partial file: `remove_leftovers` clears those, and only its caller can know that
nothing else is writing. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `target` when the block ends, and vanishes if it raises."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    try:
        # "x" refuses an existing name, so a link planted there is never followed.
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `target` when the block ends, and vanishes if it raises.

    An existing `target` is not replaced: OSError, unless it is an empty folder.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_folder(partial)
        os.rename(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def write_atomic(target: Path, data: bytes) -> None:
    """Gives `target` exactly `data`, or leaves it as it was."""
    with atomic_file(target) as file:
        file.write(data)


def remove_leftovers(folder: Path) -> None:
    """Removes the partial files of writers that were killed; call it only while none is writing."""
    for partial in folder.glob(f".*{PARTIAL_SUFFIX}"):
        partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # Without this a power cut can forget the new name although the bytes are on the disk.
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
