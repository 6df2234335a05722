"""Places that drive the engine: calls of `Engine.step`, found in the text.

What holds an engine is known by its name or its annotation: `engine`, `self._engine`, a parameter
of type `Engine`, and a name that such a value or `Engine(...)` is assigned to. A class whose `step`
only hands on to an engine's counts as an engine itself, so that its callers are found, not it.
"""

from __future__ import annotations

import ast
import re

from tests.reading import Function, nodes
from tests.structure.imports import Files

ENGINE = "Engine"


def drivers_of_step(files: Files) -> list[str]:
    """Return every call of an engine's `step`, outside of the engine and of what tests drive."""
    outside = {
        path: text
        for path, text in files.items()
        if ".step()" in text and not path.startswith(("engine/", "testing/"))
    }
    kinds, calls = {ENGINE}, _calls(outside, {ENGINE})
    while found := {kind for kind, _ in calls if kind} - kinds:
        kinds |= found
        calls = _calls(outside, kinds)
    return [place for kind, place in calls if kind is None]


def _calls(files: Files, kinds: set[str]) -> list[tuple[str | None, str]]:
    """Return each call of `step` of a value of these kinds: the class that only hands it on, if one
    does, and the place."""
    found: list[tuple[str | None, str]] = []
    for path, text in files.items():
        names = _holders(text, kinds)
        handed = {
            call: node.name
            for node in nodes(text)
            if isinstance(node, ast.ClassDef)
            for method in node.body
            if isinstance(method, Function) and method.name == "step"
            if (call := _only_call(method)) is not None
        }
        found += [
            (handed.get(node), f"{path}:{node.lineno} {ast.unparse(node)}")
            for node in nodes(text)
            if isinstance(node, ast.Call) and not node.args and not node.keywords
            if isinstance(node.func, ast.Attribute) and node.func.attr == "step"
            if _last_name(node.func.value).lstrip("_") in names
        ]
    return found


def _holders(text: str, kinds: set[str]) -> set[str]:
    """Return the names, without leading underscores, that hold a value of these kinds in a file."""
    names = {re.sub(r"(?<!^)(?=[A-Z])", "_", kind).lower() for kind in kinds}
    word = re.compile(rf"\b(?:{'|'.join(kinds)})\b")
    for _ in range(2):  # a name may be read before the place that binds it
        for node in nodes(text):
            if isinstance(node, ast.arg) and node.annotation is not None:
                bound = [node.arg] if word.search(ast.unparse(node.annotation)) else []
            elif isinstance(node, ast.AnnAssign):
                bound = [_last_name(node.target)] * bool(word.search(ast.unparse(node.annotation)))
            elif isinstance(node, ast.Assign) and _holds(node.value, kinds, names):
                bound = [_last_name(target) for target in node.targets]
            else:
                continue
            names |= {name.lstrip("_") for name in bound}
    return names - {""}


def _holds(value: ast.expr, kinds: set[str], names: set[str]) -> bool:
    """Return whether an expression makes a value of these kinds, or is a name that holds one."""
    if isinstance(value, ast.Call):
        return _last_name(value.func) in kinds
    return _last_name(value).lstrip("_") in names


def _only_call(method: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.Call | None:
    """Return the call that is all a method does, its docstring and `with` aside."""
    body = method.body[ast.get_docstring(method) is not None :]
    while len(body) == 1 and isinstance(body[0], ast.With):
        body = body[0].body
    only = body[0] if len(body) == 1 else None
    value = only.value if isinstance(only, ast.Return | ast.Expr) else None
    return value if isinstance(value, ast.Call) else None


def _last_name(node: ast.AST) -> str:
    """Return `b` of `a.b` or of `b`; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
