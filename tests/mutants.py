"""Changes one token of a package and looks whether its tests notice.

    scripts/mutants [--seed N] [--count K] [--only 3,17] [--tests PATH] [PACKAGE ...]

draws K changes by the seed, all over the packages, makes each in a copy of the sources, and runs
the tests of its package (tests/PACKAGE) until one fails. What no test notices is printed with its
number, as it stands then. Add a test, and show with --only NUMBER --tests PATH, beside the same
seed, count, packages and sources, that it notices; or say in the note of the change why it changes
nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.reading import ROOT

PACKAGES = ("engine", "strategies", "processors", "stops", "cache", "bridge", "config")
PATIENCE = 900.0
"""Seconds after which tests that still run count as having noticed: they may never end."""
_SWAPS: dict[str, tuple[str, ...]] = {
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "//": ("*",),
    "%": ("//",),
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "&": ("|",),
    "|": ("&",),
    "and": ("or",),
    "or": ("and",),
    "True": ("False",),
    "False": ("True",),
    "min": ("max",),
    "max": ("min",),
    "any": ("all",),
    "all": ("any",),
    "0": ("1",),
    "1": ("0", "2"),
    "2": ("1",),
}


@dataclass(frozen=True)
class Mutant:
    """A place in a file, counted in lines from 1 and columns from 0, and its other token."""

    path: Path
    line: int
    column: int
    old: str
    new: str

    def apply(self, text: str) -> str:
        """Return the text of the file with the other token."""
        lines = text.splitlines(keepends=True)
        whole = lines[self.line - 1]
        end = self.column + len(self.old)
        lines[self.line - 1] = whole[: self.column] + self.new + whole[end:]
        return "".join(lines)

    def __str__(self) -> str:
        shown = self.apply((ROOT / self.path).read_text(encoding="utf-8"))
        line = shown.splitlines()[self.line - 1].strip()
        return f"{self.path}:{self.line}: {self.old!r} -> {self.new!r}: {line}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield every change of one token of a file that is neither a comment nor an annotation."""
    text = (ROOT / path).read_text(encoding="utf-8")
    before: list[tokenize.TokenInfo] = []
    for one in tokenize.generate_tokens(io.StringIO(text).readline):
        signature = any(word in one.line for word in ("def ", "class ", "->", "import ", "@"))
        annotated = ": " in one.line.partition("=")[0] and "|" in one.line
        unary = one.string == "*" and (not before or before[-1].string in ("(", ",", "[", "for"))
        typed = one.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER)
        if typed and not (signature or annotated or unary):
            for new in _SWAPS.get(one.string, ()):
                yield Mutant(path, one.start[0], one.start[1], one.string, new)
        before.append(one)


def drawn(packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Return so many changes, each place as likely as any other."""
    files = [
        file.relative_to(ROOT)
        for package in packages
        for file in sorted((ROOT / "src/everystep" / package).rglob("*.py"))
    ]
    every = [one for path in files for one in mutants(path)]
    return random.Random(seed).sample(every, min(count, len(every)))


def notices(mutant: Mutant, copy: Path, tests: list[str]) -> bool:
    """Return whether tests fail where the copy of the sources has the change."""
    file, text = copy / mutant.path, (ROOT / mutant.path).read_text(encoding="utf-8")
    file.write_text(mutant.apply(text), encoding="utf-8")
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    paths = os.pathsep.join((str(copy / "src"), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            line, cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    finally:
        file.write_text(text, encoding="utf-8")
    return done.returncode != 0


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers that stand in a text, divided by commas."""
    return frozenset(map(int, text.split(",")))


def main(arguments: list[str] | None = None) -> int:
    """Draw changes, print what no test notices, and how many were noticed."""
    parser = argparse.ArgumentParser(description="Do the tests of a package notice changes of it?")
    parser.add_argument("packages", nargs="*", default=list(PACKAGES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--only", type=_numbers, help="the numbers of those to run: 3,17")
    parser.add_argument("--tests", action="append", help="instead of those of the package")
    given = parser.parse_args(arguments)
    every, noticed = [*enumerate(drawn(given.packages, given.count, given.seed))], 0
    found = [(n, one) for n, one in every if given.only is None or n in given.only]
    if given.only is not None and len(found) < len(given.only):
        parser.error(f"--only takes numbers from 0 to {len(every) - 1}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src")
        for number, one in found:
            package = one.path.parts[2]
            if notices(one, copy, given.tests or [f"tests/{package}"]):
                noticed += 1
            else:
                print(f"{number} {one}", flush=True)
    print(f"{noticed} of {len(found)} were noticed")
    return int(noticed < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
