"""Strategies are short, and the engine never asks which one it serves.

The files are read, not run: what stands in them is what counts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.reading import parsed, sources
from tests.structure.imports import imported_names
from tests.test_layers import dotted

LONGEST = 250
# What strategies and the engine both speak of: nouns, and the type of what `pick` gives.
COMMON = {"Batch", "DecidesLate", "Picked", "may_know"}
ASKING = {"isinstance", "issubclass", "type", "hasattr", "getattr", "vars", "dir", "callable"}
OF_KIND = {"__class__", "__name__", "__qualname__", "__dict__", "__module__"}

Files = Mapping[str, str]


def long_strategies(files: Files) -> list[str]:
    """Classes of the strategies' files that have more lines than LONGEST."""
    own = {path: text for path, text in files.items() if path.startswith("strategies/")}
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, text in own.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.ClassDef) and (node.end_lineno or 0) - node.lineno >= LONGEST
    ]


def is_strategy(node: ast.AST) -> bool:
    """Whether an expression is a strategy: a name or an attribute that is called so."""
    return dotted(node).rpartition(".")[2] in ("strategy", "strategies")


def asked_kinds(files: Files) -> list[str]:
    """Every place in the engine that compares, inspects or asks the kind of a strategy."""
    engine = {path: text for path, text in files.items() if path.startswith("engine/")}
    found = []
    for path, text in engine.items():
        for line, name in imported_names(path, text):
            if name.startswith("everystep.strategies") and name.split(".")[-1] not in COMMON:
                found.append(f"{path}:{line} imports {name}")
        found += [f"{path}:{line} {what}" for line, what in questions(parsed(text))]
    return found


def questions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and kind of everything that looks at what a strategy is, not at what it says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ASKING:
            if any(map(is_strategy, node.args)):
                yield node.lineno, f"calls {dotted(node.func)}"
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(map(is_strategy, sides)) and not _with_none(node):
                yield node.lineno, "compares strategies"
        elif isinstance(node, ast.Match) and is_strategy(node.subject):
            yield node.lineno, "matches a strategy"
        elif isinstance(node, ast.Attribute) and node.attr in OF_KIND and is_strategy(node.value):
            yield node.lineno, f"reads {node.attr}"


def _with_none(node: ast.Compare) -> bool:
    """Whether it is only asked if there is one."""
    return all(isinstance(one, ast.Constant) and one.value is None for one in node.comparators)


def test_strategies_are_short() -> None:
    assert long_strategies(sources()) == []


def test_a_long_strategy_is_found() -> None:
    text = "class Long:\n" + "    x = 1\n" * LONGEST
    assert len(long_strategies({"strategies/a.py": text})) == 1
    assert long_strategies({"strategies/a.py": text.removesuffix("    x = 1\n")}) == []


def test_the_engine_asks_no_strategy_what_it_is() -> None:
    assert asked_kinds(sources()) == []


@pytest.mark.parametrize(
    "text",
    [
        "from everystep.strategies import Beam",
        "def f():\n    from everystep.strategies.beam import Beam",
        "isinstance(request.strategy, object)",
        "type(group.request.strategy) is int",
        "hasattr(strategy, 'rivals')",
        "getattr(request.strategy, 'searches', 1)",
        "request.strategy == other",
        "other in (1, strategy)\nstrategy is other",
        "match request.strategy:\n    case _:\n        pass",
        "request.strategy.__class__",
    ],
)
def test_a_question_is_found(text: str) -> None:
    assert len(asked_kinds({"engine/a.py": text})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "request.strategy.streams and request.strategy.width > 1",
        "request.strategy is None",
        "cast(DecidesLate, request.strategy)",
        "alike.setdefault(request.strategy, [])",
    ],
)
def test_what_a_strategy_says_may_be_asked(text: str) -> None:
    assert asked_kinds({"engine/a.py": text}) == []
