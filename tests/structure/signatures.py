"""Signatures, names and docstrings of many files: what is untyped, and what stands twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable

from tests.reading import Function, nodes
from tests.structure.imports import Files

BAG = re.compile(r"(?:Mutable)?(?:Mapping|dict)\[str, Any\](?: \| None)?")
# A mapping, but the text of a config.json and not keywords.
NO_BAGS = {"config"}
# What tells about something that is not named yet: the sentence has to be read twice.
VAGUE_START = re.compile(r"(?:What|Whether|How|Where|Those|Which|That)\b")


def untyped_bags(files: Files) -> list[str]:
    """Return functions that take a `Mapping[str, Any]`, a `dict[str, Any]` or `**names: Any`."""
    return [
        f"{path}:{function.lineno} {function.name}({', '.join(bags)})"
        for path, text in files.items()
        for function in nodes(text)
        if isinstance(function, Function) and (bags := _bags(function.args))
    ]


def _bags(arguments: ast.arguments) -> list[str]:
    one_by_one = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found = [one.arg for one in one_by_one if BAG.fullmatch(_annotation(one))]
    rest = arguments.kwarg
    more = [f"**{rest.arg}"] if rest is not None and _annotation(rest) == "Any" else []
    return [name for name in found if name not in NO_BAGS] + more


def _annotation(argument: ast.arg) -> str:
    return "" if argument.annotation is None else ast.unparse(argument.annotation)


def uses_of_any(files: Files) -> list[str]:
    """Return every place of the word `Any` in code, imports included."""
    return [
        f"{path}:{token.start[0]}"
        for path, text in files.items()
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.NAME and token.string == "Any"
    ]


def vague_docstrings(files: Files) -> list[str]:
    """Return functions and classes whose docstring begins neither with a verb nor with a noun."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, text in files.items()
        for node in nodes(text)
        if isinstance(node, Function | ast.ClassDef)
        if VAGUE_START.match(ast.get_docstring(node) or "")
    ]


def repeated_files(files: Files) -> list[str]:
    """Return the names that files of several folders have, `__init__.py` aside."""
    return _repeated((path.rpartition("/")[2], path) for path in files if "__init__" not in path)


def repeated_classes(files: Files) -> list[str]:
    """Return the names that classes of several files have."""
    return _repeated(
        (node.name, path)
        for path, text in files.items()
        for node in nodes(text)
        if isinstance(node, ast.ClassDef)
    )


def _repeated(places: Iterable[tuple[str, str]]) -> list[str]:
    by_name: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in places:
        by_name[name].add(path)
    return [
        f"{name}: {', '.join(sorted(paths))}"
        for name, paths in sorted(by_name.items())
        if len(paths) > 1
    ]
