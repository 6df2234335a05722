"""Writing a file, or a folder of files, so that it is either whole or absent.

The bytes go to a new file beside the target, reach the disk, and only then take the target's name;
whatever ends the writing early, Ctrl-C included, removes them. A file keeps its permissions and its
owner, and a link still leads to it. A device or a pipe is not replaced: it gets the bytes when all
of them are there.

A process that is killed outright leaves its partial file. While its writer lives it holds a lock on
it, which the system drops when the process dies: so the next writer of the same target knows which
ones nobody writes any more, and removes those. Where there are no such locks they stay. Nothing
here knows what the bytes mean.
"""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from everystep.errors import FileError, MissingFileError
from everystep.files.opening import is_there

if sys.platform != "win32":
    import fcntl

PARTIAL_SUFFIX = ".partial"
_HEX_BYTES = 8
_ELSEWHERE = "Give another path"


def require_writable(target: Path) -> None:
    """Refuse a place where no file can be written; the error names the path as it was given.

    MissingFileError where its folder does not exist, FileError where it is a folder or may not be
    written. Calls that compute for long ask this first.
    """
    found = _status(target)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise FileError(f"{target} is a folder", wanted="the name of a file", do=_ELSEWHERE)
    if found is not None and not stat.S_ISREG(found.st_mode):
        if not os.access(target, os.W_OK):
            raise FileError(f"{target} may not be written", do=_ELSEWHERE)
        return
    folder = _end_of_links(target).parent
    if not folder.is_dir():
        what = f"{target} cannot be written: the folder {folder} does not exist"
        raise MissingFileError(what, do=f"Make the folder, or {_ELSEWHERE.lower()}")
    if not os.access(folder, os.W_OK | os.X_OK):
        what = f"{target} cannot be written: nothing may be written into {folder}"
        raise FileError(what, do=_ELSEWHERE)


@contextmanager
def atomic_file(target: Path, *, follows: bool = True) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `target` when the block ends, and vanishes if it raises.

    Errors of `require_writable` come before the block. A link is replaced unless it `follows`
    links: in a folder of a downloaded model it leads to a file that other folders share.
    """
    require_writable(target)
    found = _status(target)
    if found is not None and not stat.S_ISREG(found.st_mode):
        with tempfile.TemporaryFile() as file:
            yield file
            file.seek(0)
            with os.fdopen(os.open(target, os.O_WRONLY), "wb") as device:
                shutil.copyfileobj(file, device)
        return
    target = _end_of_links(target) if follows else target
    # "x" refuses an existing name, so a link planted there is never followed.
    with _partial(target.parent, target.name, lambda path: path.open("xb").close()) as partial:
        with partial.open("r+b") as file:
            if found is not None:
                _belong(partial, found)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    _sync_folder(target.parent)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder that becomes `target` when the block ends, and vanishes if it raises.

    An existing `target` is not replaced: FileError, unless it is an empty folder.
    """
    target = _end_of_links(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _partial(target.parent, target.name, Path.mkdir) as partial:
        if (found := _status(target)) is not None and stat.S_ISDIR(found.st_mode):
            _belong(partial, found)
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
    """Yield a new folder whose files lie in `target` when the block ends, and vanish if it raises.

    Other files of `target` stay, but those with `stale` names, which go. `last` is the file without
    which the others are nothing: where `target` has one it goes first, and the new one comes last,
    so that whoever finds it finds everything. A link gives way to a file of its name, and what it
    leads to stays. FileError where `target` is a file, or has a device or a pipe in a file's place.
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
        for new in partial.iterdir():
            _take_place(new, target / new.name)
        (target / last).unlink(missing_ok=True)
        for old in target.iterdir():
            if stale(old.name):
                old.unlink()
        for new in sorted(partial.iterdir(), key=lambda path: path.name == last):
            os.replace(new, target / new.name)
        _remove(partial)
    _sync_folder(target)


def write_atomic(target: Path, data: bytes, *, follows: bool = True) -> None:
    """Give `target` exactly `data`, or leave it as it was; `follows`: as of `atomic_file`."""
    with atomic_file(target, follows=follows) as file:
        file.write(data)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed writers of `folder / name`, or of anything in it, have left there."""
    begin = "." if name is None else _beginning(name)
    digits = "*" if name is None else "[0-9a-f]" * (2 * _HEX_BYTES)
    for partial in folder.glob(f"{glob.escape(begin)}{digits}{PARTIAL_SUFFIX}"):
        lock = _lock(partial, wait=False)
        if lock is not None:
            _remove(partial)
            os.close(lock)


@contextmanager
def _partial(folder: Path, name: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """Make something under a new name, locked while the block lasts; removed if it raises."""
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
    """Return a descriptor that holds the lock of a file or folder; None if there is none to be
    had."""
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


def _status(path: Path) -> os.stat_result | None:
    """Return the kind, permissions and owner of what the path leads to; None where nothing is
    there."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be written", got=error, do=_ELSEWHERE) from error


def _end_of_links(target: Path) -> Path:
    """Return the path that a link leads to in the end; any other path as it is."""
    return Path(os.path.realpath(target)) if target.is_symlink() else target


def _belong(new: Path, old: os.stat_result) -> None:
    """Give what is new the permissions of what it replaces, and its owner where that is allowed."""
    if hasattr(os, "chown"):
        with suppress(OSError):
            os.chown(new, old.st_uid, old.st_gid)
    os.chmod(new, stat.S_IMODE(old.st_mode))


def _take_place(new: Path, old: Path) -> None:
    """Let a file belong as the one that it is about to replace; FileError where that is none."""
    if not is_there(old) or old.is_symlink():
        return
    found = old.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise FileError(f"{old} is no regular file", do="Remove it, or choose another folder")
    _belong(new, found)


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
