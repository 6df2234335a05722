"""Imports go downward only, as in docs/structure.md, and some things are used in one place only.

The files are read, not run, so an import inside a function or for type checking counts like any
other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.reading import PACKAGE, parsed, sources

# The face, __init__.py itself, lies between the api it shows and the programs that use it.
FACE = "__init__"
ORDER: tuple[tuple[str, ...], ...] = (
    ("_version", "types", "errors", "memory", "processor"),
    ("config", "nn", "draws", "text", "images", "sounds", "files", "outputs"),
    ("cache", "processors", "stops", "shown"),
    ("models", "adapters", "executors"),
    ("strategies",),
    ("engine", "bridge", "streamers"),
    ("requests",),
    ("drivers",),
    ("runs", "speech"),
    ("api",),
    (FACE,),
    ("train", "server", "inspector", "cli"),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# (importer, imported) of one level, each with its reason.
LISTED: dict[tuple[str, str], str] = {
    ("memory", "errors"): "what does not fit is an error",
    ("types", "errors"): "a value that cannot be saved, or bytes that are damaged, are errors",
    ("config", "files"): "a configuration is read from a folder or from the hub",
    ("text", "files"): "a tokenizer is written file by file, each whole or not at all",
    ("images", "text"): "placeholders of pictures stand among the tokens of a text",
    ("sounds", "files"): "sounds, and how they are prepared, are read from files",
    ("images", "files"): "how pictures are prepared is read from a folder",
    ("executors", "models"): "an executor runs a model: it reads specification and weights",
    ("adapters", "models"): "an adapter changes projections of a decoder, found by their names",
    ("executors", "adapters"): "an executor adds what the adapters of a feed say",
}
# Who may write to standard output: programs, and the streamer whose work that is.
# Compiles the kernels while the package is installed: a program, though it lies beside them.
BUILD = "executors/native/build.py"
PRINTING = ("cli/", "streamers", BUILD)
# The program in which templates are rendered: it forgets the variables before it begins.
CAGED = "text/caged.py"
ENVIRONMENT = ("files/sources.py", BUILD, CAGED)
ORACLES = {"transformers", "peft"}
UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {"torch.load", "torch.save", "os.system", "os.popen", "numpy.load", "np.load"}

Files = Mapping[str, str]


def module_of(path: str) -> str:
    """`cache/rows.py` is everystep.cache.rows, `cache/__init__.py` everystep.cache."""
    parts = [PACKAGE, *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """The name in ORDER that a module of the package belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FACE


def imported_names(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that a file imports."""
    package = [PACKAGE, *path.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{start}.{alias.name}") for alias in node.names)


def inner_imports(files: Files) -> Iterator[tuple[str, int, str]]:
    """Path, line and imported module of every import of the package by itself."""
    modules = {module_of(path) for path in files}
    for path, text in files.items():
        for line, name in imported_names(path, parsed(text)):
            if name.split(".")[0] == PACKAGE:
                parent = name.rpartition(".")[0]
                yield path, line, name if name in modules or not parent else parent


def upward_arrows(files: Files) -> list[str]:
    """Every import of something higher, or of another package of the same level."""
    found = []
    for path, line, target in inner_imports(files):
        importer, imported = package_of(module_of(path)), package_of(target)
        if importer in (imported, "testing") or (importer, imported) in LISTED:
            continue
        if imported == "testing" or LEVEL[importer] <= LEVEL[imported]:
            found.append(f"{path}:{line} {importer} imports {imported}")
    return found


def unplaced_packages(files: Files) -> list[str]:
    """Packages that ORDER does not know."""
    return sorted({package_of(module_of(path)) for path in files} - {*LEVEL, "testing"})


def without_typing(text: str) -> str:
    """The source without its `if TYPE_CHECKING:` blocks."""
    tree = ast.parse(text)
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return ast.unparse(tree)


def cycle(files: Files) -> list[str]:
    """Modules that import each other in a ring, as a path; empty if none do.

    What is imported for the type checker alone closes no ring.
    """
    edges: dict[str, set[str]] = {module_of(path): set() for path in files}
    at_run_time = {path: without_typing(text) for path, text in files.items()}
    for path, _, target in inner_imports(at_run_time):
        edges[module_of(path)].add(target)
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        longer = [*trail, module]
        rings = (visit(to, longer) for to in sorted(edges.get(module, ())))
        ring = next(filter(None, rings), [])
        done.add(module)
        return ring

    return next(filter(None, (visit(module, []) for module in sorted(edges))), [])


def dotted(node: ast.AST) -> str:
    """`torch.nn.Linear` for that attribute of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def mentions(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports, calls by bare name, or takes as an attribute."""
    tree = parsed(text)
    yield from imported_names(path, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node)):
            yield node.lineno, name
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id


def is_within(name: str, banned: str) -> bool:
    return name == banned or name.startswith(f"{banned}.")


def broken_bans(files: Files) -> list[str]:
    """Every use of something in a place where it may not be used."""
    found = []
    for path, text in files.items():
        for line, name in mentions(path, text):
            if why := broken_ban(path, name):
                found.append(f"{path}:{line} {name}: {why}")
    return found


def broken_ban(path: str, name: str) -> str | None:
    """Why a file may not mention a name; None if it may."""
    first = name.split(".")[0]
    if (path.startswith(("strategies/", "types/"))) and is_within(name, "torch.nn"):
        return "strategies and nouns know no layers"
    printed = name in ("print", "sys.stdout", "sys.stderr") or is_within(name, "sys.stdout")
    if printed and not path.startswith(PRINTING):
        return "only the command line prints"
    if name in ("os.getenv", "os.environb") or is_within(name, "os.environ"):
        return None if path in ENVIRONMENT else "environment variables are read in one file"
    if first in ORACLES and not path.startswith("bridge/"):
        return "other libraries' models belong to the bridge"
    if first in UNSAFE_MODULES or name in UNSAFE_NAMES | UNSAFE_ATTRIBUTES:
        return "it can run code out of data"
    return None


def test_every_package_has_a_level() -> None:
    assert unplaced_packages(sources()) == []


def test_every_folder_is_a_package() -> None:
    folders = {path.rpartition("/")[0] for path in sources()} - {""}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in sources()] == []


def test_imports_go_downward() -> None:
    assert upward_arrows(sources()) == []


def test_every_listed_pair_is_needed() -> None:
    arrows = inner_imports(sources())
    pairs = {(package_of(module_of(path)), package_of(target)) for path, _, target in arrows}
    assert {*LISTED} <= pairs


def test_no_modules_import_each_other() -> None:
    assert cycle(sources()) == []


def test_nothing_is_used_where_it_may_not_be() -> None:
    assert broken_bans(sources()) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("nn/a.py", "from everystep.cache import rows"),
        ("nn/a.py", "def f():\n    import everystep.cache.rows"),
        ("nn/a.py", "if TYPE_CHECKING:\n    from everystep.engine import Engine"),
        ("nn/a.py", "from ..api import generate"),
        ("nn/a.py", "from everystep import cache"),
        ("nn/a.py", "from everystep import generate"),
        ("files/a.py", "from everystep.text import Tokenizer"),
        ("cli/a.py", "from everystep.server import app"),
        ("api.py", "from everystep.testing import HashModel"),
    ],
)
def test_an_upward_arrow_is_found(path: str, text: str) -> None:
    others = dict.fromkeys(["__init__.py", "cache/__init__.py", "cache/rows.py", "api.py"], "")
    assert len(upward_arrows({**others, path: text})) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("api.py", "from everystep.nn.a import b"),
        ("cli/a.py", "import everystep as es"),
        ("cache/a.py", "from .rows import Rows"),
        ("testing/a.py", "from everystep.engine import Engine"),
    ],
)
def test_a_downward_arrow_is_let_through(path: str, text: str) -> None:
    assert upward_arrows({"__init__.py": "", "cache/rows.py": "", path: text}) == []


def test_a_ring_is_found() -> None:
    files = {
        "nn/a.py": "from everystep.nn.b import x",
        "nn/b.py": "from everystep.nn import c",
        "nn/c.py": "def f():\n    from everystep.nn.a import y",
        "nn/__init__.py": "from everystep.nn.a import z",
    }
    assert cycle(files) == [f"{PACKAGE}.nn.{name}" for name in "abca"]


def test_an_unknown_package_is_found() -> None:
    assert unplaced_packages({"misc/a.py": "", "nn/a.py": ""}) == ["misc"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("strategies/a.py", "from torch import nn"),
        ("strategies/a.py", "import torch\ntorch.nn.Linear"),
        ("types/__init__.py", "import torch.nn.functional as F"),
        ("engine/a.py", "print(1)"),
        ("engine/a.py", "sys.stdout.write('')"),
        ("text/a.py", "os.environ.get('HOME')"),
        ("text/a.py", "from os import environ"),
        ("models/a.py", "def f():\n    import transformers.models"),
        ("files/a.py", "import pickle"),
        ("files/a.py", "torch.load(path)"),
        ("files/a.py", "from torch import load"),
        ("files/a.py", "eval('1')"),
        ("files/a.py", "os.system('true')"),
    ],
)
def test_a_broken_ban_is_found(path: str, text: str) -> None:
    assert broken_bans({path: text}) != []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cli/a.py", "print(1)"),
        ("files/sources.py", "os.environ.get('HOME')"),
        ("bridge/a.py", "import transformers"),
        ("models/a.py", "model.eval()\nre.compile('a')\nfrom torch import nn"),
    ],
)
def test_what_is_allowed_is_let_through(path: str, text: str) -> None:
    assert broken_bans({path: text}) == []
