"""The form of the code: sizes, names, docstrings, and what may not stand in a file at all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.reading import ROOT, body_lines, functions, parsed, project_files, sources
from tests.structure.signatures import vague_docstrings

LONGEST_FUNCTION = 60
USUAL_FUNCTION = 10  # the median of src
LONG_FUNCTION = 25  # nine of ten functions of src are no longer

EMPTY_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers", "misc"}
# Who may assert: packages that keep state which no input of a user can make wrong.
ASSERTING = ("cache/", "engine/", "executors/", "testing/")
# Whose docstrings are still to be rewritten.
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
BARE_TODO = re.compile(r"\b(?:TODO|FIXME)\b(?!\(#\d+\))")
PRIVATE_PATH = re.compile(r"(?<![\w.-])/(?:work|opt)/|(?:\.\./|(?<![\w/.-]))shared/")
# Its own patterns and examples would be found.
THIS_FILE = Path(__file__).resolve()
TEXT_SUFFIXES = {".py", ".md", ".toml", ".cpp", ".h", ".json", ".yml", ".yaml", ".txt", ".cfg", ""}

Files = Mapping[str, str]


def long_functions(files: Files) -> list[str]:
    """Functions with more lines than LONGEST_FUNCTION."""
    return [
        f"{path}:{function.lineno} {function.name}: {body_lines(function)} lines"
        for path, text in files.items()
        for function in functions(parsed(text))
        if body_lines(function) > LONGEST_FUNCTION
    ]


def is_overload(node: ast.AST) -> bool:
    """Whether it is one of the signatures of a function, without a body."""
    marks = getattr(node, "decorator_list", [])
    return any(isinstance(mark, ast.Name) and mark.id == "overload" for mark in marks)


def missing_docstrings(files: Files) -> list[str]:
    """Modules without a docstring, and public functions and classes at their top without one."""
    found = []
    for path, text in files.items():
        tree = parsed(text)
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        public = [n for n in tree.body if isinstance(n, definitions) and n.name[0] != "_"]
        public = [n for n in public if not is_overload(n)]  # the implementation speaks for them
        found += [f"{path}: the module"] * (ast.get_docstring(tree) is None)
        found += [f"{path}:{n.lineno} {n.name}" for n in public if ast.get_docstring(n) is None]
    return found


def defined_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every class and function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def empty_names(files: Files) -> list[str]:
    """Files, folders, classes and functions whose name says nothing about what they do."""
    found = [path for path in files if says_nothing(path.removesuffix(".py"))]
    for path, text in files.items():
        names = defined_names(parsed(text))
        found += [f"{path}:{line} {name}" for line, name in names if says_nothing(name)]
    return found


def says_nothing(name: str) -> bool:
    return bool(EMPTY_NAMES & {word.lower() for word in WORD.findall(name)})


def forbidden_asserts(files: Files) -> list[str]:
    """Asserts outside ASSERTING, and asserts that do not say in words what must hold."""
    return [
        f"{path}:{node.lineno}"
        for path, text in files.items()
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Assert) and not (path.startswith(ASSERTING) and node.msg)
    ]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    """Every line of the project's text files that matches; what tests read as data is not asked."""
    found = []
    for path in project_files():
        if path.suffix in TEXT_SUFFIXES and path != THIS_FILE and "data" not in path.parts:
            found += matching_lines(path, pattern)
    return found


def matching_lines(path: Path, pattern: re.Pattern[str]) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    where = path.relative_to(ROOT)
    return [f"{where}:{i}: {line}" for i, line in enumerate(lines, 1) if pattern.search(line)]


@pytest.fixture(params=["src/everystep", "tests", "bench"])
def folder(request: pytest.FixtureRequest) -> Files:
    return sources(request.param)


def test_functions_are_short(folder: Files) -> None:
    assert long_functions(folder) == []


def test_functions_are_usually_short() -> None:
    lengths = sorted(body_lines(f) for text in sources().values() for f in functions(parsed(text)))
    assert lengths[len(lengths) // 2] <= USUAL_FUNCTION
    assert lengths[len(lengths) * 9 // 10] <= LONG_FUNCTION


def test_what_is_public_is_documented() -> None:
    assert missing_docstrings(sources()) == []


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    assert vague_docstrings(sources()) == []


def test_every_file_says_what_it_is(folder: Files) -> None:
    assert [path for path, text in folder.items() if ast.get_docstring(parsed(text)) is None] == []


def test_names_say_something(folder: Files) -> None:
    assert empty_names(folder) == []


def test_asserts_are_only_for_own_invariants() -> None:
    assert forbidden_asserts(sources()) == []


def test_nothing_is_left_to_do_without_an_issue() -> None:
    assert lines_with(BARE_TODO) == []


def test_no_path_of_one_machine_is_named() -> None:
    assert lines_with(PRIVATE_PATH) == []


SIXTY_ONE_LINES = "def f():\n" + "    x = 1\n" * (LONGEST_FUNCTION + 1)


@pytest.mark.parametrize(
    ("checker", "path", "text"),
    [
        (long_functions, "a.py", SIXTY_ONE_LINES),
        (long_functions, "a.py", "class A:\n" + re.sub("^", "    ", SIXTY_ONE_LINES, flags=re.M)),
        (missing_docstrings, "a.py", "x = 1"),
        (missing_docstrings, "a.py", '"""Text."""\ndef f(): ...'),
        (missing_docstrings, "a.py", '"""Text."""\nclass A: ...'),
        (vague_docstrings, "a.py", 'def f():\n    """Whether it is so."""'),
        (vague_docstrings, "a.py", 'class A:\n    """What it knows."""'),
        (vague_docstrings, "cache/a.py", 'class A:\n    def f(self):\n        """How many."""'),
        (empty_names, "cache/utils.py", ""),
        (empty_names, "a.py", "class CacheManager: ..."),
        (empty_names, "a.py", "def f():\n    def helper_one(): ..."),
        (forbidden_asserts, "api.py", "assert x, 'a user gave x'"),
        (forbidden_asserts, "engine/a.py", "assert x"),
    ],
)
def test_bad_form_is_found(checker: object, path: str, text: str) -> None:
    assert callable(checker)
    assert len(checker({path: text})) == 1


@pytest.mark.parametrize(
    ("checker", "path", "text"),
    [
        (long_functions, "a.py", 'def f():\n    """Text.\n\n' + "    a\n" * 70 + '    """\n'),
        (missing_docstrings, "a.py", '"""Text."""\ndef _f(): ...'),
        (vague_docstrings, "a.py", 'def f():\n    """Return what it knows."""'),
        (vague_docstrings, "a.py", 'def f():\n    """Whatever."""'),
        (empty_names, "processors/base.py", "class Manage: ..."),
        (forbidden_asserts, "engine/a.py", "assert x, 'every row has an owner'"),
    ],
)
def test_good_form_is_let_through(checker: object, path: str, text: str) -> None:
    assert callable(checker)
    assert checker({path: text}) == []


@pytest.mark.parametrize("line", ["x = 1  # TODO: later", "FIXME"])
def test_a_bare_note_is_found(line: str) -> None:
    assert BARE_TODO.search(line)


def test_a_note_with_an_issue_is_let_through() -> None:
    assert not BARE_TODO.search("# TODO(#12): when torch has it")


@pytest.mark.parametrize("line", ["see /work/main", "in ../shared/design.md", "`shared/a`"])
def test_a_private_path_is_found(line: str) -> None:
    assert PRIVATE_PATH.search(line)


@pytest.mark.parametrize("line", ["network/work/a", "lib/shared/a", "a shared row", "/optimizer/"])
def test_an_ordinary_path_is_let_through(line: str) -> None:
    assert not PRIVATE_PATH.search(line)
