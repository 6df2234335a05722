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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from everystep.errors import FileError
from everystep.files.opening import is_there

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

    An existing `target` is not replaced: FileError, unless it is an empty folder.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync_folder(partial)
        try:
            os.rename(partial, target)
        except OSError as error:
            if not is_there(target):
                raise
            do = "Another process made it meanwhile: use that, or give another name"
            raise FileError(f"{target} is there already", do=do) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def atomic_files(target: Path, last: str, stale: Callable[[str], bool]) -> Iterator[Path]:
    """Yields a new folder whose files lie in `target` when the block ends, and vanish if it raises.

    Other files of `target` stay, but those with `stale` names, which go. `last` is the file without
    which the others are nothing: where `target` has one it goes first, and the new one comes last,
    so that whoever finds it finds everything. FileError where `target` is a file.
    """
    if target.exists() and not target.is_dir():
        raise FileError(f"{target} is a file", wanted="a folder", do="Choose another place")
    if not target.exists() or not any(target.iterdir()):
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(target) as folder:
            yield folder
        return
    partial = target / f".{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
    partial.mkdir()
    try:
        yield partial
        (target / last).unlink(missing_ok=True)
        for old in target.iterdir():
            if stale(old.name):
                old.unlink()
        for new in sorted(partial.iterdir(), key=lambda path: path.name == last):
            os.replace(new, target / new.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _sync_folder(target)


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
