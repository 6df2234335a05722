"""The imports of the package by itself, as edges of a graph, and the circles in it.

The files are read, not run, so an import inside a function or for type checking counts like any
other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.reading import PACKAGE, nodes

# The face, __init__.py itself, lies between the api it shows and the programs that use it.
FACE = "__init__"

Files = Mapping[str, str]
Edges = dict[str, set[str]]


def module_of(path: str) -> str:
    """Return everystep.cache.rows for `cache/rows.py`, everystep.cache for `cache/__init__.py`."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the package right below everystep that a module belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def imported_names(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything that a file imports."""
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in nodes(text):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def inner_imports(files: Files) -> Iterator[tuple[str, int, str]]:
    """Yield path, line and imported module of every import of the package by itself."""
    modules = {module_of(path) for path in files}
    for path, text in files.items():
        for line, name in imported_names(path, text):
            if name.split(".")[0] == PACKAGE:
                parent = name.rpartition(".")[0]
                yield path, line, name if name in modules or not parent else parent


def module_edges(files: Files) -> Edges:
    """Return what each module imports."""
    edges: Edges = {module_of(path): set() for path in files}
    for path, _, target in inner_imports(files):
        edges[module_of(path)].add(target)
    return edges


def package_edges(files: Files) -> Edges:
    """Return what the modules of each package import of other packages."""
    edges: Edges = {package_of(module_of(path)): set() for path in files}
    for path, _, target in inner_imports(files):
        importer, imported = package_of(module_of(path)), package_of(target)
        edges[importer] |= {imported} - {importer}
    return edges


def circles(edges: Edges) -> list[list[str]]:
    """Return the largest sets of names each of which leads to every other, and to itself."""
    reached = {name: _reached(edges, name) for name in edges}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in edges
        if name in reached[name]
    }
    return [list(circle) for circle in sorted(found)]


def all_circles(files: Files) -> list[list[str]]:
    """Return the circles of modules, then those of packages."""
    return circles(module_edges(files)) + circles(package_edges(files))


def _reached(edges: Edges, start: str) -> set[str]:
    """Return all names that a name leads to."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found
