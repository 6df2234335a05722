"""Private members that are used by another module than the one that defines them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.reading import PACKAGE, Function, nodes, parsed
from tests.structure.imports import Files, imported_names, module_of

OWN = ("self", "cls")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(files: Files) -> list[str]:
    """Return every `x._y` in a file none of whose classes has a `_y`, where another file has one.

    What an object takes from itself is not counted: a class may inherit it. Private members of
    other libraries are not counted either. An import of a private name is.
    """
    members = {path: _of_classes(text) for path, text in files.items()}
    known = {name for path, text in files.items() for name in members[path] | _at_top(text)}
    modules = {module_of(path) for path in files}
    found = []
    for path, text in files.items():
        foreign = _attributes(text, known - members[path])
        found += [f"{path}:{line} {use}" for line, use in foreign]
        found += [
            f"{path}:{line} {name}"
            for line, name in imported_names(path, text)
            if name.startswith(f"{PACKAGE}.") and name not in modules
            if is_private(name.rpartition(".")[2])
        ]
    return found


def _attributes(text: str, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of every attribute of one of the names, but for an object's own."""
    for node in nodes(text):
        if isinstance(node, ast.Attribute) and node.attr in names and not _is_own(node):
            yield node.lineno, ast.unparse(node)


def _of_classes(text: str) -> set[str]:
    """Return the private members of a file's classes: in their bodies, slots and of `self`."""
    names: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.ClassDef):
            names |= _bound(node.body) | _slots(node.body)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def _at_top(text: str) -> set[str]:
    """Return the private names that a module binds."""
    return {name for name in _bound(parsed(text).body) if is_private(name)}


def _bound(body: list[ast.stmt]) -> set[str]:
    """Return the names that the statements of a body bind."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            inner = (part for target in targets for part in ast.walk(target))
            names |= {part.id for part in inner if isinstance(part, ast.Name)}
    return names


def _slots(body: list[ast.stmt]) -> set[str]:
    """Return the names in a class's `__slots__`."""
    return {
        str(part.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
        for part in ast.walk(node.value)
        if isinstance(part, ast.Constant)
    }


def _is_own(node: ast.Attribute) -> bool:
    """Return whether it is an attribute of `self` or `cls`."""
    return isinstance(node.value, ast.Name) and node.value.id in OWN
