"""Counts what docs/structure.md promises of the code, as `scripts/structure` shows it.

The five rooms are the packages above the engine: `requests`, `drivers`, `runs`, `speech` and `api`.
`--places` lists what each figure counts:

- Circles: sets of modules, or of packages, each of which imports every other, if only by way of
  others; imports for type checking count (`imports.py`).
- Files of the biggest room, and lines of all five, rounded up to 100 in the table.
- Functions before submit, carriers of a value, types: see `traced.py`, which runs a call.
- Drivers: places outside of the engine that call `Engine.step` (`steps.py`).
- Untyped bags: functions of the rooms that take a `Mapping[str, Any]`, a `dict[str, Any]` or
  `**names: Any`; a mapping called `config` is the text of a config.json and is not counted.
- `Any`: each time that the word stands in the code of the rooms, imports included.
- Private members of another file: uses of them (`private.py`).
- Without a bound, because they should only become fewer: docstrings that begin with What, Whether,
  How, Where, Those, Which or That, rounded up to 10, and names that several files or classes have.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from tests.reading import ROOT, sources
from tests.structure.imports import Files, all_circles
from tests.structure.private import private_uses
from tests.structure.signatures import (
    repeated_classes,
    repeated_files,
    untyped_bags,
    uses_of_any,
    vague_docstrings,
)
from tests.structure.steps import drivers_of_step

ROOMS = ("requests", "drivers", "runs", "speech", "api")
PAGE = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- structure: begin -->", "<!-- structure: end -->"


@dataclass(frozen=True)
class Figure:
    """A count, the places behind it, and the most that it may be.

    `bound`: what is wanted. `most`: what it may be until then, for one that exceeds its bound; it
    only ever sinks. `count`: None is the number of places. `note`: what the table says behind it.
    `grain`: the table rounds up to multiples of it.
    """

    name: str
    places: Sequence[str]
    bound: int | None = None
    _: KW_ONLY
    most: int | None = None
    note: str = ""
    grain: int = 1
    count: int | None = None

    @property
    def now(self) -> int:
        """The count."""
        return len(self.places) if self.count is None else self.count

    @property
    def limit(self) -> int | None:
        """The most that it may be now, if it is limited."""
        return self.bound if self.most is None else self.most

    @property
    def exceeds(self) -> bool:
        """True if there are more than there may be."""
        return self.limit is not None and self.now > self.limit

    def row(self) -> str:
        """Return the figure as a row of the table."""
        rounded = -(-self.now // self.grain) * self.grain
        bound = "" if self.bound is None else f"{self.bound:,}"
        return f"| {self.name} | {rounded:,}{self.note} | {bound} |"


def of_files(files: Files) -> list[Figure]:
    """Return the figures of the package's files."""
    rooms = {path: text for path, text in files.items() if path.split("/")[0] in ROOMS}
    lines = {path: len(text.splitlines()) for path, text in rooms.items()}
    return [
        Figure("circles of imports", [" -> ".join(one) for one in all_circles(files)], 0),
        Figure("files of the biggest room", _biggest(rooms), 20),
        Figure("places that drive `Engine.step`", drivers_of_step(files), 1),
        Figure("signatures with an untyped bag", untyped_bags(rooms), 3),
        Figure("`Any` in the five rooms", uses_of_any(rooms), 120),
        Figure(
            "lines of the five rooms",
            [f"{path}: {count}" for path, count in lines.items()],
            10_500,
            most=16_600,
            grain=100,
            count=sum(lines.values()),
        ),
        Figure("private members of another file", private_uses(files), 0),
        Figure("docstrings that begin with What, Whether, ...", vague_docstrings(files), grain=10),
        Figure("names that several files have", repeated_files(files)),
        Figure("names that several classes have", repeated_classes(files)),
    ]


def of_call(traced: Mapping[str, Sequence[str]]) -> list[Figure]:
    """Return the figures of a greedy call."""
    before, entered = traced["before"], traced["all"]
    files, of_all = _files_of(before), len(_files_of(entered))
    return [
        Figure(
            "functions before `Engine.submit`", before, 100, most=131, note=f" of {len(entered)}"
        ),
        Figure("files of these", files, 30, most=44, note=f" of {of_all}"),
        _carriers("`max_new_tokens`", traced["length"], 30, most=34),
        _carriers("a logits processor", traced["processor"], 35, most=40),
        _carriers("a hook", traced["hook"], 50, most=67),
        Figure("types made by a greedy call", traced["types"], 50, most=62),
    ]


def _carriers(what: str, found: Sequence[str], bound: int, *, most: int | None = None) -> Figure:
    """Return the figure of the functions that carry something."""
    note = f" in {len(_files_of(found))} files"
    return Figure(f"functions that carry {what}", found, bound, most=most, note=note)


def _files_of(places: Sequence[str]) -> list[str]:
    """Return the files of places, which begin with a path and a colon."""
    return sorted({place.partition(":")[0] for place in places})


def _biggest(rooms: Files) -> list[str]:
    """Return the files of the room that has the most."""
    by_room = [[path for path in rooms if path.startswith(f"{room}/")] for room in ROOMS]
    return max(by_room, key=len)


def table(found: Sequence[Figure]) -> str:
    """Return the figures as a table of Markdown."""
    rows = [one.row() for one in found]
    return "\n".join(["| figure | now | bound |", "| --- | --- | --- |", *rows])


def with_table(page: str, shown: str) -> str:
    """Return a page with a table between the two marks, in place of what stands there."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"structure: {PAGE.name} lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{shown}\n{END}{after}"


def problems(found: Sequence[Figure], page: str) -> list[str]:
    """Return a line for each figure beyond its bound, and one if the page shows others."""
    lines = [f"{one.name}: {one.now}; at most {one.limit}" for one in found if one.exceeds]
    if with_table(page, table(found)) != page:
        lines.append(f"docs/{PAGE.name} shows other figures; run scripts/structure --write")
    return lines


def counted() -> list[Figure]:
    """Return every figure, those with a bound first; the call is traced in a process of its own."""
    command = [sys.executable, "-m", "tests.structure.traced"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tracing:
        found = of_files(sources())
        output, _ = tracing.communicate()
    if tracing.returncode:
        raise SystemExit(tracing.returncode)
    found += of_call(json.loads(output))
    return sorted(found, key=lambda one: one.bound is None)


def main() -> int:
    """Show the figures, or do what the options of `scripts/structure` ask for."""
    options = argparse.ArgumentParser(prog="scripts/structure")
    for name in ("check", "write", "places"):
        options.add_argument(f"--{name}", action="store_true")
    asked = options.parse_args()
    found = counted()
    print(table(found))
    if asked.places:
        for one in found:
            print(f"\n{one.name}:", *one.places, sep="\n  ")
    page = PAGE.read_text(encoding="utf-8")
    if asked.write:
        page = with_table(page, table(found))
        PAGE.write_text(page, encoding="utf-8")
    wrong = problems(found, page) if asked.check else []
    for line in wrong:
        print(f"structure: {line}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
