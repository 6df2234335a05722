"""The project as text: what the tests of form read.

Finds the files and parses them; what they should look like is for those tests to say.
"""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "everystep"
FOLDERS_NOT_OURS = {".git", ".venv", "build", "dist", "__pycache__", ".hypothesis"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources(folder: str = "src/everystep") -> dict[str, str]:
    """Path from `folder` to text, of every Python file under it, sorted."""
    top = ROOT / folder
    return {
        path.relative_to(top).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(top.rglob("*.py"))
        if not FOLDERS_NOT_OURS & set(path.parts)
    }


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file's text."""
    return ast.parse(text)


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of the syntax tree of a file's text, walked once for all who read it."""
    return tuple(ast.walk(parsed(text)))


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Every file that is, or is about to be, under version control; without git, every file."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if result.returncode == 0:
        found = (ROOT / name for name in result.stdout.decode().split("\0") if name)
    else:
        found = (path for path in ROOT.rglob("*") if not FOLDERS_NOT_OURS & set(path.parts))
    return tuple(sorted(path for path in found if path.is_file()))


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method, inner ones included."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def body_lines(function: Function) -> int:
    """Lines of a function's body from its first statement, its docstring not counted."""
    body = function.body[ast.get_docstring(function) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of a Python file."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text
