"""What the Python of the guides imports is what the guides say to install.

`scripts/stranger` runs that Python in an environment which has nothing else, but only a third of
the pages with each commit. Here it is read off all of them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.test_documents import blocks, guides
from tests.reading import PACKAGE, ROOT, parsed, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BEFORE = ("cli", "hub", "grammar")
"""The extras of the README, which `scripts/stranger` installs first."""
APART = "with-other-programs"
"""The page whose programs are the extra `others`; `tests/test_extras.py` reads it."""


def pages() -> list[Path]:
    return [path for path in guides() if path.stem != APART]


@cache
def words() -> tuple[frozenset[str], frozenset[str]]:
    """The extras and the packages of others that the pages name, found as by the script."""
    text = "".join(path.read_text(encoding="utf-8") for path in pages() if path.stem != "README")
    extras = {
        one for found in re.findall(r"everystep\[([a-z,]*)\]", text) for one in found.split(",")
    }
    others = {
        one for found in re.findall(r"`pip install ([a-z ]*)`", text) for one in found.split()
    }
    return frozenset({*extras, *BEFORE}), frozenset(others)


@cache
def installed() -> frozenset[str]:
    """The distributions that these words bring, and what those need."""
    extras, others = words()
    named = [*PROJECT["dependencies"], *others]
    named += [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return frozenset(canonicalize_name(one) for one in brought(named))


def brought(lines: Iterable[str]) -> set[str]:
    """The names of these requirements and of theirs, as far as they are here."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in lines]
    while waiting:
        one = waiting.pop()
        asked = {f"{one.name}[{extra}]" for extra in one.extras} | {one.name}
        if asked <= found:
            continue
        found |= asked
        try:
            needs = importlib.metadata.requires(one.name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in map(Requirement, needs):
            extras = [{"extra": extra} for extra in one.extras] or [{"extra": ""}]
            if line.marker is None or any(map(line.marker.evaluate, extras)):
                waiting.append(line)
    return found


@cache
def distributions() -> Mapping[str, list[str]]:
    """Which distributions bring a module."""
    return importlib.metadata.packages_distributions()


def imported(code: str) -> Iterator[str]:
    """The modules that a program imports, by their whole names."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def lacking(code: str) -> set[str]:
    """The modules of a program that nothing brings, and the extras of ours that nobody names."""
    extras, _ = words()
    found = set()
    for name in imported(code):
        root = name.partition(".")[0]
        if root == PACKAGE:
            found |= {f"{name} ({extra})" for extra in needed(name) if extra not in extras}
        elif root not in sys.stdlib_module_names:
            sources_of = {canonicalize_name(one) for one in distributions().get(root, [root])}
            found |= {root} if not sources_of & installed() else set()
    return found


@cache
def needed(module: str) -> frozenset[str]:
    """The extras without which one of our modules cannot be imported."""
    path = f"{module.removeprefix(PACKAGE).lstrip('.').replace('.', '/')}"
    text = sources().get(f"{path}.py", sources().get(f"{path}/__init__.py", ""))
    waiting: list[ast.AST] = [*parsed(text).body]
    found = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Call) and "MissingExtraError" in ast.unparse(node.func):
            given = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found |= {one for one in given if one in PROJECT["optional-dependencies"]}
        waiting += ast.iter_child_nodes(node)
    return frozenset(found)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_what_a_page_imports_is_installed(path: Path) -> None:
    code = "".join(block.text for block in blocks(path.read_text(encoding="utf-8"), "python"))
    assert lacking(code) == set()


def test_what_is_not_installed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import httpx, torch, os\nfrom everystep.inspector.widget import show\nimport hypothesis"
    assert lacking(code) == {"hypothesis"}
    monkeypatch.setattr(f"{__name__}.words", lambda: (frozenset(BEFORE), frozenset()))
    installed.cache_clear()
    assert lacking(code) == {"hypothesis", "everystep.inspector.widget (notebook)"} | {
        name for name in ("httpx",) if name not in installed()
    }
    installed.cache_clear()


def test_every_extra_of_a_user_is_named() -> None:
    """So that no call of a page can miss one."""
    (every,) = PROJECT["optional-dependencies"]["all"]
    assert {*re.split(r"[\[\],]", every)[1:-1]} <= words()[0]
