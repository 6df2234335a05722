"""Imports go downward only, as in docs/structure.md, and some things are used in one place only.

The files are read, not run, so an import inside a function or for type checking counts like any
other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.reading import PACKAGE, nodes, sources
from tests.structure.imports import (
    FACE,
    Files,
    all_circles,
    circles,
    imported_names,
    inner_imports,
    module_edges,
    module_of,
    package_edges,
    package_of,
)
from tests.structure.private import private_uses

ORDER: tuple[tuple[str, ...], ...] = (
    ("_version", "types", "errors", "memory", "processor", "devices"),
    ("config", "nn", "draws", "text", "images", "sounds", "files", "outputs"),
    ("cache", "processors", "stops", "shown", "records"),
    ("models", "adapters", "executors", "dialogue"),
    ("strategies",),
    ("engine", "bridge", "streamers"),
    ("requests",),
    ("drivers",),
    ("runs", "speech"),
    ("api",),
    ("train",),
    (FACE,),
    ("server", "inspector", "cli"),
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
    ("cli", "server"): "the command `everystep serve` starts the server",
    ("executors", "adapters"): "an executor adds what the adapters of a feed say",
    ("cli", "inspector"): "the command `inspect` prints what the inspector makes of a record",
    ("records", "shown"): "a record shows itself in a notebook",
    ("inspector", "server"): "a page is listened for as the server is, signals left alone",
}
# Who may write to standard output: programs, and the streamer whose work that is.
# Compiles the kernels while the package is installed: a program, though it lies beside them.
BUILD = "executors/native/build.py"
PRINTING = ("cli/", "streamers", BUILD)
# The program in which templates are rendered: it forgets the variables before it begins.
CAGED = "text/caged.py"
# Ray is told by variables alone not to tell others how it is used.
RAY = "server/ray/"
ENVIRONMENT = ("files/sources.py", BUILD, CAGED, f"{RAY}cluster.py")
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


def dotted(node: ast.AST) -> str:
    """`torch.nn.Linear` for that attribute of an attribute of a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def mentions(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports, calls by bare name, or takes as an attribute."""
    yield from imported_names(path, text)
    for node in nodes(text):
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
    if first == "ray" and not path.startswith(RAY):
        return "engines on Ray belong to one package"
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


def test_no_modules_and_no_packages_import_each_other() -> None:
    assert all_circles(sources()) == []


def test_private_members_are_used_in_their_own_file() -> None:
    assert private_uses(sources()) == []


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
        ("inspector/a.py", "from everystep.cli import app"),
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


def test_a_circle_of_modules_is_found() -> None:
    files = {
        "nn/a.py": "from everystep.nn.b import x",
        "nn/b.py": "from everystep.nn import c",
        "nn/c.py": "def f():\n    from everystep.nn.a import y",
        "nn/d.py": "from everystep.nn import a",
        "nn/__init__.py": "from everystep.nn.a import z",
    }
    assert circles(module_edges(files)) == [[f"{PACKAGE}.nn.{name}" for name in "abc"]]


def test_a_circle_for_type_checking_is_found() -> None:
    typing = "if TYPE_CHECKING:\n    from everystep.nn.a import A"
    files = {"nn/a.py": "from everystep.nn.b import b", "nn/b.py": typing}
    assert all_circles(files) == [[f"{PACKAGE}.nn.a", f"{PACKAGE}.nn.b"]]


def test_a_circle_of_packages_is_found() -> None:
    files = {
        "nn/a.py": "from everystep.text.a import a",
        "nn/b.py": "",
        "text/a.py": "",
        "text/b.py": "from everystep.nn.b import b",
    }
    assert circles(module_edges(files)) == []
    assert circles(package_edges(files)) == all_circles(files) == [["nn", "text"]]


def test_a_line_of_imports_is_no_circle() -> None:
    files = {"nn/a.py": "from everystep.nn.b import b", "nn/b.py": "", "text/a.py": "import re"}
    assert all_circles({**files, "nn/c.py": "from everystep.nn import a, b"}) == []


OWNER = """
class Run:
    __slots__ = ("_slot",)
    _field: int
    def __init__(self):
        self._held = 1
    def _method(self): ...

def _function(): ...
"""


@pytest.mark.parametrize(
    "use",
    [
        "run._held",
        "run._held = 2",
        "self.run._method()",
        "run._field",
        "run._slot",
        "owner._function()",
        "from everystep.runs.owner import _function",
        "from .owner import _function",
        "def _held(run):\n    return run._held",  # a function of this name excuses no member
    ],
)
def test_a_private_member_of_another_file_is_found(use: str) -> None:
    assert len(private_uses({"runs/owner.py": OWNER, "runs/a.py": use})) == 1


@pytest.mark.parametrize(
    "use",
    [
        "self._held",  # it may be inherited
        "torch._C",
        "one._replace(a=1)",
        "run.__dict__",
        "from everystep import _version",
        "class A:\n    def f(self, other):\n        self._held = other._held",
    ],
)
def test_a_private_member_of_its_own_is_let_through(use: str) -> None:
    assert private_uses({"_version.py": "", "runs/owner.py": OWNER, "runs/a.py": use}) == []


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
        ("server/a.py", "import ray.data"),
        ("server/ray/a.py", "os.environ.get('HOME')"),
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
        ("server/ray/a.py", "import ray"),
        ("models/a.py", "model.eval()\nre.compile('a')\nfrom torch import nn"),
    ],
)
def test_what_is_allowed_is_let_through(path: str, text: str) -> None:
    assert broken_bans({path: text}) == []
