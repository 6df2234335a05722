"""Writing a file, or a folder of files, so that it is either whole or absent.

The bytes go to a new file beside the target, reach the disk, and only then take the target's name;
whatever ends the writing early, Ctrl-C included, removes them. A process that is killed outright
leaves its partial file. While its writer lives it holds a lock on it, which the system drops when
the process dies: so the next writer of the same target knows which ones nobody writes any more, and
removes those. Where there are no such locks they stay. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from everystep.errors import FileError
from everystep.files.opening import is_there

if sys.platform != "win32":
    import fcntl

PARTIAL_SUFFIX = ".partial"
_HEX_BYTES = 8


@contextmanager
def atomic_file(target: Path) -> Iterator[BinaryIO]:
    """Yields a binary file that becomes `target` when the block ends, and vanishes if it raises."""
    # "x" refuses an existing name, so a link planted there is never followed.
    with _partial(target.parent, target.name, lambda path: path.open("xb").close()) as partial:
        with partial.open("r+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    _sync_folder(target.parent)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yields a new folder that becomes `target` when the block ends, and vanishes if it raises.

    An existing `target` is not replaced: FileError, unless it is an empty folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _partial(target.parent, target.name, Path.mkdir) as partial:
        yield partial
        _sync_folder(partial)
        try:
            os.rename(partial, target)
        except OSError as error:
            if not is_there(target):
                raise
            do = "Another process made it meanwhile: use that, or give another name"
            raise FileError(f"{target} is there already", do=do) from error
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
        with atomic_folder(target) as folder:
            yield folder
        return
    remove_leftovers(target.parent, target.name)
    with _partial(target, "", Path.mkdir) as partial:
        yield partial
        (target / last).unlink(missing_ok=True)
        for old in target.iterdir():
            if stale(old.name):
                old.unlink()
        for new in sorted(partial.iterdir(), key=lambda path: path.name == last):
            os.replace(new, target / new.name)
        _remove(partial)
    _sync_folder(target)


def write_atomic(target: Path, data: bytes) -> None:
    """Gives `target` exactly `data`, or leaves it as it was."""
    with atomic_file(target) as file:
        file.write(data)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers of `folder / name`, or of anything in it, have left there."""
    begin = "." if name is None else _beginning(name)
    digits = "*" if name is None else "[0-9a-f]" * (2 * _HEX_BYTES)
    for partial in folder.glob(f"{glob.escape(begin)}{digits}{PARTIAL_SUFFIX}"):
        lock = _lock(partial, wait=False)
        if lock is not None:
            _remove(partial)
            os.close(lock)


@contextmanager
def _partial(folder: Path, name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """What `make` makes under a new name, locked while the block lasts; removed if it raises."""
    remove_leftovers(folder, name)
    partial, lock = _made(folder, name, make)
    try:
        yield partial
    except BaseException:
        _remove(partial)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def _made(folder: Path, name: str, make: Callable[[Path], None]) -> tuple[Path, int | None]:
    while True:
        partial = folder / f"{_beginning(name)}{secrets.token_hex(_HEX_BYTES)}{PARTIAL_SUFFIX}"
        make(partial)
        try:
            lock = _lock(partial, wait=True)
        except BaseException:
            _remove(partial)
            raise
        # Before it was locked, another writer could take it for one that nobody writes.
        if os.path.lexists(partial):
            return partial, lock
        if lock is not None:
            os.close(lock)


def _beginning(name: str) -> str:
    return f".{name}." if name else "."


def _lock(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of a file or folder; None if there is none to be had."""
    if sys.platform == "win32":
        return None
    try:
        kind = path.lstat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            return None
        raise
    return descriptor


def _remove(path: Path) -> None:
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _sync_folder(folder: Path) -> None:
    # Without this a power cut can forget the new name although the bytes are on the disk.
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
