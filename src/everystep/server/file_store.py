"""Files that clients keep on a server: in one folder, bounded, each seen by its key alone.

A file is two: its bytes, and a note of what it is. The note is written last and removed first, so
that a process that is killed leaves no file that is half there.
"""

from __future__ import annotations

import fcntl
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from everystep.errors import CapacityError, FileError, RequestError
from everystep.files.atomic import remove_leftovers, write_atomic
from everystep.server.fields import Json

_NOTE, _BYTES = ".json", ".data"


class UnknownFileError(RequestError):
    """The caller has no file of this id."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The bytes of a file and of all of them, and the files of one key, at most."""

    file_bytes: int = 200 << 20
    total_bytes: int = 8 << 30
    files: int = 1000


class StoredFile(msgspec.Struct, frozen=True):
    """A file that is kept. `owner`: the digest of its key, None where there are no keys."""

    id: str
    owner: str | None
    filename: str
    purpose: str
    size: int
    created_at: int

    def shown(self) -> dict[str, Json]:
        """Return it as OpenAI's clients read it."""
        about = {"id": self.id, "object": "file", "bytes": self.size, "filename": self.filename}
        return {
            **about,
            "created_at": self.created_at,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
            "expires_at": None,
        }


class FileStore:
    """The files in a folder, which one process alone uses."""

    def __init__(self, folder: Path, limits: StoreLimits | None = None) -> None:
        self.limits = limits or StoreLimits()
        self._folder = folder / "files"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            do = "Give each server a folder of its own"
            raise FileError(f"another server uses {folder}", do=do) from error
        remove_leftovers(self._folder)
        self._files = {one.id: one for one in self._read()}
        for path in self._folder.glob(f"*{_BYTES}"):
            if path.stem not in self._files:
                path.unlink()

    def close(self) -> None:
        """Let another process use the folder."""
        self._lock.close()

    def _read(self) -> list[StoredFile]:
        read = msgspec.json.Decoder(StoredFile).decode
        notes = [read(path.read_bytes()) for path in self._folder.glob(f"*{_NOTE}")]
        return sorted(notes, key=lambda one: (one.created_at, one.id))

    def require_room(self, owner: str | None) -> None:
        """Raise CapacityError if the caller has as many files as a key may have."""
        if len(self.listed(owner)) >= self.limits.files:
            wanted = f"at most {self.limits.files}"
            raise CapacityError("there are too many files", wanted=wanted, do="Delete some")

    def add(
        self,
        owner: str | None,
        filename: str,
        purpose: str,
        write: Callable[[BinaryIO], None],
        id: str | None = None,
    ) -> StoredFile:
        """Keep a file whose bytes `write` writes, as a new one or as that of this id;
        CapacityError if there is no room for it."""
        id = id or f"file-{secrets.token_hex(12)}"
        path = self._folder / f"{id}{_BYTES}"
        try:
            with path.open("wb") as file:
                write(file)
                size = file.tell()
            kept = sum(one.size for one in [*self._files.values()])
            if kept + size > self.limits.total_bytes:
                wanted = f"at most {self.limits.total_bytes} bytes of all files"
                raise CapacityError("the files are too long", wanted=wanted, do="Delete some")
            found = StoredFile(id, owner, filename[:255], purpose, size, int(time.time()))
            write_atomic(self._folder / f"{id}{_NOTE}", msgspec.json.encode(found))
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        self._files[id] = found
        return found

    def find(self, owner: str | None, id: str) -> StoredFile:
        """Return the file of this id; UnknownFileError unless the caller has it."""
        found = self._files.get(id)
        if found is None or found.owner != owner:
            raise UnknownFileError(f"there is no file {id[:80]!r}", do="Ask GET /v1/files")
        return found

    def listed(self, owner: str | None) -> list[StoredFile]:
        """Return the caller's files, the oldest first."""
        return [one for one in [*self._files.values()] if one.owner == owner]

    def path(self, file: StoredFile) -> Path:
        """Return where the bytes are."""
        return self._folder / f"{file.id}{_BYTES}"

    def remove(self, file: StoredFile) -> None:
        """Keep the file no longer."""
        (self._folder / f"{file.id}{_NOTE}").unlink(missing_ok=True)
        self.path(file).unlink(missing_ok=True)
        self._files.pop(file.id, None)


def copied(source: BinaryIO) -> Callable[[BinaryIO], None]:
    """Return what writes the bytes of this file into another one."""

    def write(target: BinaryIO) -> None:
        source.seek(0)
        shutil.copyfileobj(source, target)

    return write
