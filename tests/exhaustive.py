"""Which of the exhaustive tests passed on which commit.

    scripts/exhaustive             shows it
    scripts/exhaustive PART...     runs these folders or files of tests: laws, server/test_pairs.py
    scripts/exhaustive --left      runs every part that has not passed on today's sources

They take hours, so they are shared out over days: the newest run of each folder, or of its files
one by one, is a row of tests/exhaustive.json. A row is about a commit, so nothing runs where the
sources differ from the last one; and it names the packages that its tests had loaded, so that what
else changes since does not count. Of files of tests only those count that a part's own import or
name.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from tests.loaded import ALL, place_of
from tests.reading import ROOT, nodes, sources
from tests.structure.imports import imported_names

RECORD = ROOT / "tests/exhaustive.json"
WATCHED = ("src", "tests", "pyproject.toml", ":(exclude)tests/exhaustive.json")
"""What a passed test is about, for git."""


@dataclass(frozen=True)
class Run:
    """The newest run of a part: its commit, its day, its tests and its seconds, and the packages
    that they had loaded, none where that is not known or may be all."""

    commit: str
    day: str
    tests: int
    failed: int
    seconds: int
    loaded: str = ""

    def had_loaded(self, file: str) -> bool:
        """Return whether its tests may have loaded a file."""
        place = place_of(file)
        return not self.loaded or place is None or place in self.loaded.split()


_MARKS = re.compile(r"mark\.(slow|few)\b")


@cache
def files() -> tuple[str, ...]:
    """Return the files of tests that have some for `--all` alone, by their folders."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    slow = (one for one in found if _MARKS.search(one.read_text(encoding="utf-8")))
    names = (str(one.relative_to(ROOT / "tests")) for one in slow)
    return tuple(name for name in names if "/" in name)


def folder_of(part: str) -> str:
    """Return the folder of a part, which may be one itself."""
    return part.split("/")[0]


def folders() -> list[str]:
    """Return the folders of these files."""
    return [*dict.fromkeys(map(folder_of, files()))]


def parts(runs: Mapping[str, Run]) -> list[str]:
    """Return what ran and what never did, folder by folder: folders, and files of those that did
    not run as a whole or of which some ran again."""
    found: list[str] = []
    for folder in folders():
        own = [name for name in files() if folder_of(name) == folder]
        if folder in runs or not runs.keys() & {*own}:
            found += [folder, *(name for name in own if name in runs)]
        else:
            found += own
    return found


def kept(runs: Mapping[str, Run], part: str, newest: Run) -> dict[str, Run]:
    """Return the runs with that of a part, and without those that it is newer than."""
    found = {**runs, part: newest}
    folder = folder_of(part)
    own = {name for name in files() if folder_of(name) == folder}
    outdone = own if part == folder else {folder} if own <= found.keys() else set[str]()
    return {name: one for name, one in found.items() if name == part or name not in outdone}


def read(path: Path = RECORD) -> dict[str, Run]:
    """Return the newest run of each part that ever ran."""
    if not path.is_file():
        return {}
    return {name: Run(**row) for name, row in json.loads(path.read_text()).items()}


def write(runs: Mapping[str, Run], path: Path = RECORD) -> None:
    """Keep the runs, part by part."""
    rows = {name: _row(runs[name]) for name in sorted(runs)}
    lines = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _row(one: Run) -> dict[str, object]:
    return {name: value for name, value in asdict(one).items() if value != ""}


def counted(report: Path) -> tuple[int, int]:
    """Return how many tests a report in JUnit's format has, and how many of them did not pass."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites for name in names)

    return total("tests"), total("failures", "errors", "skipped")


def _git(*arguments: str) -> str:
    line = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def changed_since(commit: str) -> list[str] | None:
    """Return the files, of those that a test is about, which differ from a commit; None where the
    history does not have it."""
    known = ["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"]
    if subprocess.run(known, capture_output=True, check=False).returncode:
        return None
    names = _git("diff", "--name-only", commit, "--", *WATCHED).splitlines()
    new = _git("ls-files", "--others", "--exclude-standard", "--", *WATCHED).splitlines()
    return names + new


def since(part: str, one: Run, changed: Iterable[str] | None) -> int | None:
    """Return how many of the files that have changed since the run of a part may change how it
    ends."""
    if changed is None:
        return None
    return sum(one.had_loaded(file) and not is_of_others(file, part) for file in changed)


# --- files of tests that a part does not read -----------------------------------------------------

_DOTTED = re.compile(r"\btests(?:\.\w+)+")
_FILE = re.compile(r"\b[\w/]+\.py\b")


def is_of_others(file: str, part: str) -> bool:
    """Return whether a file of tests that stands there is neither one of a part nor read by one."""
    if not (file.startswith("tests/") and file.endswith(".py") and (ROOT / file).is_file()):
        return False
    return file.removeprefix("tests/") not in read_by(part)


@cache
def read_by(part: str) -> frozenset[str]:
    """Return the files below tests/ that those of a part import or name, and those that these do:
    a program that a test starts is named by it."""
    found, waiting = set[str](), [name for name in files() if part in (name, folder_of(name))]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += named_in(name)
    return frozenset(found)


@cache
def named_in(file: str) -> frozenset[str]:
    """Return the files below tests/ that one of these imports or names, and its conftest.py's."""
    texts, beside = sources("tests"), set[str]()
    imported = {name for _, name in imported_names(file, texts[file])}
    names = imported | {name.rpartition(".")[0] for name in imported}
    for node in nodes(texts[file]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {*_DOTTED.findall(node.value)}
            beside |= {*_FILE.findall(node.value)}
    places = {name.replace(".", "/").removeprefix("tests/") for name in names}
    found = {f"{place}.py" for place in places} | {f"{place}/__init__.py" for place in places}
    found |= {one.removeprefix("tests/") for one in beside}
    found |= {(Path(file).parent / one).as_posix() for one in beside}
    found |= {(folder / "conftest.py").as_posix() for folder in Path(file).parents}
    return frozenset(found & texts.keys())


def run(part: str) -> Run:
    """Return how the exhaustive tests of a part ended on the last commit."""
    start = time.monotonic()
    commit = _git("rev-parse", "--short=12", "HEAD").strip()
    with tempfile.TemporaryDirectory() as place:
        report, names = Path(place) / "report.xml", Path(place) / "loaded"
        line = [str(ROOT / "scripts/test"), "--all", "-m", "slow", "-q", f"--junitxml={report}"]
        ended = subprocess.run([*line, f"--loaded={names}", f"tests/{part}"], cwd=ROOT, check=False)
        tests, failed = counted(report) if report.is_file() else (0, 0)
        loaded = {*names.read_text().split()} if names.is_file() else {ALL}
    if ended.returncode and not failed:
        sys.exit(f"exhaustive: tests/{part} did not end, and nothing is kept of it")
    day = datetime.now(UTC).date().isoformat()
    known = "" if ALL in loaded else " ".join(sorted(loaded))
    return Run(commit, day, tests, failed, round(time.monotonic() - start), known)


def shown(runs: Mapping[str, Run], changed: Mapping[str, int | None]) -> str:
    """Return a line for each part: how its newest run ended, and how old it is."""
    names = parts(runs)
    wide = max(map(len, names))
    head = f"{'passed':>7} {'failed':>7} {'minutes':>8}  commit        files since"
    lines = [f"{'part':{wide}} {head}"]
    for name in names:
        if (one := runs.get(name)) is None:
            lines.append(f"{name:{wide}} never ran")
            continue
        figures = f"{one.tests - one.failed:7,} {one.failed:7,} {one.seconds / 60:8.0f}"
        since = "unknown" if changed[name] is None else f"{changed[name]:,}"
        lines.append(f"{name:{wide}} {figures}  {one.commit}  {since}")
    return "\n".join(lines)


def left(runs: Mapping[str, Run], changed: Mapping[str, int | None]) -> list[str]:
    """Return the parts that have not passed on what stands now, the shortest ones first."""
    open_ones = [
        name for name in parts(runs)
        if name not in runs or runs[name].failed or changed[name] != 0
    ]  # fmt: skip
    return sorted(open_ones, key=lambda name: runs[name].seconds if name in runs else 0)


def main(arguments: Iterable[str]) -> str | None:
    """Show, or run and keep; return what is wrong."""
    asked = list(arguments)
    runs = read()
    differ = {commit: changed_since(commit) for commit in {one.commit for one in runs.values()}}
    changed = {name: since(name, one, differ[one.commit]) for name, one in runs.items()}
    if not asked:
        print(shown(runs, changed))
        return None
    if differing := changed_since("HEAD"):
        return f"exhaustive: commit first; {differing[0]} is not as it is in the last commit"
    wanted = left(runs, changed) if asked == ["--left"] else asked
    if unknown := {*wanted} - {*folders(), *files()}:
        return f"exhaustive: no such folder or file of slow tests: {', '.join(sorted(unknown))}"
    for part in wanted:
        newest = run(part)
        write(kept(read(), part, newest))  # read now: another run may have kept something since
    return "exhaustive: some failed" if any(read()[one].failed for one in wanted) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
