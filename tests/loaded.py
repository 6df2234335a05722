"""Which packages the tests of a process had loaded: what their outcome can depend on.

A program that they start loads what it likes, so that all packages count then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.reading import ROOT

ALL = "all"
"""What stands in place of names where a program was started that may load anything."""
_FORKS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn"})
_STARTED = {"multiprocessing.popen_spawn_posix", "multiprocessing.popen_forkserver"}
"""Modules of Python that are imported with the first process which they start, of which the
interpreter's events say nothing."""


def place_of(file: str) -> str | None:
    """The package of ours, or the folder of tests, that a file is in; None for those in none, such
    as errors.py and conftest.py: everything may depend on them."""
    parts = Path(file).parts
    if parts[:2] == ("src", "everystep") and len(parts) > 3:
        return parts[2]
    if parts[:1] == ("tests",) and len(parts) > 2:
        return "/".join(parts[:2])
    return None


def places(files: Iterable[str]) -> set[str]:
    """The packages and folders of these files."""
    return {place for file in files if (place := place_of(file)) is not None}


def may_load_anything(event: str, arguments: tuple[Any, ...]) -> bool:
    """Whether an event of the interpreter starts a program of ours that may load any package: a
    fork, or an interpreter that is not given a file of one package to run."""
    if event in _FORKS:
        return True
    if event != "subprocess.Popen":
        return False
    _, line, *_ = arguments
    words = [line] if isinstance(line, str | bytes | os.PathLike) else [*line]
    told = [os.fsdecode(word) for word in words]
    if not any("python" in Path(word).name or "everystep" in word for word in told[:2]):
        return False
    scripts = [word for word in told if word.endswith(".py") and Path(word).is_relative_to(ROOT)]
    return not any(place_of(str(Path(one).relative_to(ROOT))) for one in scripts)


class LoadedPackages:
    """A plugin that adds to a file, when the tests of its process are over, what they had loaded:
    a name in each line."""

    def __init__(self, path: Path) -> None:
        self._path, self._anything = path, False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        self._anything = self._anything or may_load_anything(event, arguments)

    def pytest_sessionfinish(self) -> None:
        files = (getattr(one, "__file__", None) for one in [*sys.modules.values()])
        own = (Path(file) for file in files if file is not None)
        found = places(str(one.relative_to(ROOT)) for one in own if one.is_relative_to(ROOT))
        anything = self._anything or bool(_STARTED & sys.modules.keys())
        lines = [ALL] if anything else sorted(found)
        with self._path.open("a") as out:
            out.write("".join(f"{line}\n" for line in lines))
