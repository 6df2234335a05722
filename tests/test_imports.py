"""What a file imports of this project is there, in tests and benchmarks too.

The files are read, not run: that a name has moved is known in seconds, and not when an hour of
tests has gone by.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.reading import ROOT, nodes, parsed, sources

FOLDERS = ("src", "tests", "bench")
BASES = {"everystep": "src", "tests": ".", "parts": "bench", "engines": "bench"}
"""The folders of packages, by their first names."""


def missing(text: str) -> Iterator[str]:
    """Names that a file imports from where there are none such."""
    for node in nodes(text):
        if not isinstance(node, ast.ImportFrom) or node.level or node.module is None:
            continue
        base = BASES.get(node.module.partition(".")[0])
        if base is None:
            continue
        place = ROOT.joinpath(base, *node.module.split("."))
        known = names_of(place)
        for name in [one.name for one in node.names if known is not None]:
            if name not in known and names_of(place / name) == frozenset():
                yield f"{node.module}.{name}"


@cache
def names_of(place: Path) -> frozenset[str] | None:
    """The names of a module or package; none where there is no such file, None where a function
    makes them."""
    files = [place.with_suffix(".py"), place / "__init__.py"]
    found = next((one for one in files if one.exists()), None)
    if found is None:
        return frozenset()
    names = {*bound(parsed(found.read_text(encoding="utf-8")).body)}
    return None if "__getattr__" in names else frozenset(names | {"__name__", "__file__"})


def bound(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, also where a condition holds."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from ((each.asname or each.name).partition(".")[0] for each in one.names)
        else:
            for name in ast.walk(one):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id
            for inner in ("body", "orelse", "finalbody"):
                yield from bound(getattr(one, inner, []))
            for handler in getattr(one, "handlers", []):
                yield from bound(handler.body)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_is_imported_is_there(folder: str) -> None:
    found = {file: [*missing(text)] for file, text in sources(folder).items()}
    assert len(found) > 20
    assert {file: names for file, names in found.items() if names} == {}


def test_a_name_that_has_moved_is_told() -> None:
    text = (
        "from everystep.drivers.rectangle import call_inputs, call_options\n"
        "from everystep.nowhere import thing\nfrom everystep import drivers\n"
        "def late():\n    from tests.reading import ROOT, sauces\n"
    )
    assert [*missing(text)] == [
        "everystep.drivers.rectangle.call_options",
        "everystep.nowhere.thing",
        "tests.reading.sauces",
    ]
