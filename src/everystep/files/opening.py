"""Opening a file from an untrusted source.

Only regular files are opened: a pipe would block, a device would never end. The checks are made on
the opened file and not on its name, so the file cannot be exchanged between check and use. Nothing
here knows a format; `impostor` only recognises what is often found in the place of a model file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from everystep.errors import FileError, FormatError, MissingFileError, RequestError, shown

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_LONGEST_NAME = 255  # bytes, on every usual file system


def as_path(path: str | os.PathLike[str]) -> Path:
    """Return the path itself; RequestError where it cannot be one."""
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not _is_possible(text):
        wanted, do = "a path, as text or pathlib.Path", "Give the path of a file or folder"
        raise RequestError("this is no path", wanted=wanted, got=shown(path), do=do)
    return Path(text)


def _is_possible(text: str) -> bool:
    """Return True if the system can be asked for a file of this name."""
    try:
        names = os.fsencode(text).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        return False
    return bool(text) and "\0" not in text and max(map(len, names)) <= _LONGEST_NAME


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with the home folder in the place of ~; RequestError where there is none, and
    for what is no path."""
    try:
        return (Path(path) if isinstance(path, str) else as_path(path)).expanduser()
    except RuntimeError as error:
        do = "Write the path without ~"
        raise RequestError("there is no such home folder", got=shown(path), do=do) from error


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading, without buffering.

    Raises MissingFileError when it does not exist, FileError when it is of another kind or may not
    be read.
    """
    try:
        descriptor = os.open(path, _FLAGS)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} does not exist.") from error
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be opened", got=error) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{path} is no regular file", do="Give the path of a file")
    return os.fdopen(descriptor, "rb", buffering=0)


def is_there(path: Path) -> bool:
    """Return True if anything has this name, be it a link to nowhere, which fails when it is
    opened.

    Nothing has a name that cannot be one. FileError where the system does not let us look.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last for a NUL in the name
        return False
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise FileError(f"{path} cannot be looked at", got=error.strerror) from error
    return True


def size_of(file: BinaryIO) -> int:
    """Return the size in bytes of an opened file."""
    return os.fstat(file.fileno()).st_size


def read_bounded(path: Path, limit: int) -> bytes:
    """Returns the whole content of a file of at most `limit` bytes; FormatError when larger."""
    with open_regular(path) as file:
        size = size_of(file)
        if size > limit:
            raise FormatError(f"{path} is too large", wanted=f"at most {limit} bytes", got=size)
        return file.read()


def impostor(start: bytes) -> str | None:
    """Describe a file that begins with `start`, if it is a known stand-in for a model file."""
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself; run `git lfs pull` in its folder"
    if start.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "a web page, not the file itself; download the raw file"
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return "a pickle or zip archive; these are never read, convert the model to safetensors"
    return None
