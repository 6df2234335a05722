"""Docstrings that list the keywords of a call, with the lines that stand under them."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_EXAMPLE = "\n\nExample:\n"


def lists_options(options: type) -> Callable[[F], F]:
    """The function, with the keys of this `TypedDict` and a line for each in its docstring, before
    the example that it ends with.

    Where there is no docstring, or no source to read, it stays as it is.
    """

    def described(function: F) -> F:
        if function.__doc__ is not None and (lines := described_keys(options)):
            text, mark, example = inspect.cleandoc(function.__doc__).partition(_EXAMPLE)
            listed = "".join(f"    {name}: {line}\n" for name, line in lines.items())
            function.__doc__ = f"{text}\n\nOptions:\n\n{listed}{mark[1:]}{example}"
        return function

    return described


def described_keys(options: type) -> dict[str, str]:
    """Every key of a `TypedDict` and of those it is made of, and the line under it, with what a
    call adds before what it shares with others."""
    module = sys.modules[options.__module__]
    tree = _classes(module.__name__).get(options.__name__)
    if tree is None:
        return {}
    found = _of_class(tree)
    for base in tree.bases:  # the class itself has forgotten them
        inner = getattr(module, base.id, None) if isinstance(base, ast.Name) else None
        if isinstance(inner, type):
            found |= {n: line for n, line in described_keys(inner).items() if n not in found}
    return found


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    """The classes of a module as its source has them."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, SyntaxError):  # an installation without sources
        return {}
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}


def _of_class(tree: ast.ClassDef) -> dict[str, str]:
    """The names that a class annotates, and the string under each."""
    found = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found
