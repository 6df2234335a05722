"""Who may ask: keys, by digest and in constant time, and names of the host against rebinding."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from everystep.errors import FileError, MissingFileError, RequestError
from everystep.files.atomic import require_writable
from everystep.server.messages import RecordTo


def digest_of(key: str) -> str:
    """Return the digest that stands for a key in files and in memory."""
    return hashlib.sha256(key.encode()).hexdigest()


def key_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the number of each line of a file of keys, its digest, and the words after that.

    A digest is one in hexadecimal; `#` begins a comment. RequestError for a line without one,
    FileError for a file that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        do = "Write one with: printf %s KEY | sha256sum"
        raise MissingFileError(f"there is no file of keys {path}", do=do) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"the file of keys {path} cannot be read", got=str(error)) from error
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        digest = words[0].lower()
        if len(digest) != 64 or any(one not in "0123456789abcdef" for one in digest):
            raise RequestError(
                f"line {number} of a file of keys is no digest",
                wanted="64 hexadecimal digits, the SHA-256 of a key",
                do="Write it with: printf %s KEY | sha256sum",
            )
        yield number, digest, words[1:]


def read_keys(path: Path) -> list[str]:
    """Return the digests in a file of keys."""
    return [digest for _, digest, _ in key_lines(path)]


class Keys:
    """The digests of the keys that open a server; without any it is open."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self._digests = tuple(digest.encode() for digest in digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, said: str) -> str | None:
        """Return the digest of a key that opens, None for any other; in a time that tells neither
        how much of it was right nor which one it was."""
        own, found = digest_of(said), False
        for digest in self._digests:
            found |= hmac.compare_digest(own.encode(), digest)
        return own if found else None


MOST_RECORDS = 1000
"""Files that a folder of records may hold before another request is refused."""


class RecordFolder:
    """The folder of an operator's records, which its owner alone can read, a file per prompt.

    `redacted`: whether texts are left out before they reach a file. `stages`: whether what each
    processor did is in it.
    """

    def __init__(self, folder: Path, *, redacted: bool = False, stages: bool = True) -> None:
        self.folder, self.redacted, self.stages = folder, redacted, stages
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_writable(folder / "record")
        except OSError as error:
            what = f"the folder of records {folder} cannot be used"
            raise RequestError(what, got=error, do="Name another with --record-dir") from error

    @property
    def full(self) -> bool:
        """True if it holds as many files as it may."""
        with os.scandir(self.folder) as found:
            return sum(1 for _ in islice(found, MOST_RECORDS)) == MOST_RECORDS

    def another(self) -> RecordTo:
        """Return another record to write, in a file that is named by the time in UTC."""
        now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        file = self.folder / f"{now}-{secrets.token_hex(4)}.jsonl.gz"
        return RecordTo(str(file), self.redacted, self.stages)


def key_of(authorization: str, api_key: str) -> str:
    """Return the key in the headers of a request, empty for none.

    Headers come as Latin-1; a key whose bytes are UTF-8, as a shell sends them, is read as that.
    """
    kind, _, value = authorization.partition(" ")
    said = value.strip() if kind.lower() == "bearer" else api_key.strip()
    try:
        return said.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return said


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Hosts:
    """The names by which a server may be called; addresses always may.

    A page of another site whose name was rebound to this machine calls by that site's name.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", *(name.lower() for name in names)}

    def accepts(self, header: str) -> bool:
        """Return whether the Host header of a request names this server."""
        name = header.lower()
        name = (
            name.partition("]")[0][1:] if name.startswith("[") else name.rpartition(":")[0] or name
        )
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
