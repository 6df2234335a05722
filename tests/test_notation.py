"""Package names are those of docs/structure.md, shape letters those of docs/notation.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import pytest

from tests.reading import ROOT, comments, docstrings, parsed, sources
from tests.structure.imports import FACE
from tests.test_layers import ORDER

SIZE = r"(?:\.\.\.|\d+|[A-Za-z]\w*)"
DIMENSION = rf"{SIZE}(?:\s*[-+*/]+\s*{SIZE})*"
SHAPE = re.compile(rf"\((?P<inside>{DIMENSION}(?:,\s*{DIMENSION})*,?)\)")
LETTER = re.compile(r"\b[A-Z]\b")
# q_BTHD: where many tensors live at once, their names may carry their shapes.
SHAPED_NAME = re.compile(r"[a-z]+_(?P<letters>[A-Z]{2,})")

Files = Mapping[str, str]


def table(document: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first heading is `heading`, row by row, without backquotes."""
    text = (ROOT / document).read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n| {heading} |")
    lines = rest.partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in lines]


def legend() -> set[str]:
    """The letters that stand for dimensions."""
    return {row[0] for row in table("docs/notation.md", "letter")}


def shape_letters(text: str) -> set[str]:
    """Every capital letter that a text uses as a dimension: `(R, 2 * F)` has R and F."""
    shapes = [match["inside"] for match in SHAPE.finditer(text) if "," in match["inside"]]
    return {letter for shape in shapes for letter in LETTER.findall(shape)}


def name_letters(tree: ast.Module) -> set[str]:
    """Every letter in the shape at the end of a variable's name."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    matches = (SHAPED_NAME.fullmatch(name) for name in names)
    return {letter for match in matches if match for letter in match["letters"]}


def unknown_letters(files: Files, known: set[str]) -> list[str]:
    """Dimensions in comments, docstrings and names of variables that have no known letter."""
    found = []
    for path, text in files.items():
        tree = parsed(text)
        for line, written in [*comments(text), *docstrings(tree)]:
            found += [f"{path}:{line} {x}" for x in sorted(shape_letters(written) - known)]
        found += [f"{path} {x}" for x in sorted(name_letters(tree) - known)]
    return found


def test_shapes_are_written_in_the_letters_of_the_legend() -> None:
    assert unknown_letters(sources(), legend()) == []


def test_the_table_of_layers_is_the_order_that_is_tested() -> None:
    rows = table("docs/structure.md", "level")
    written = [tuple(row[1].split(", ")) for row in rows if row[0].isdigit()]
    unnamed = {"_version", "__main__", FACE}
    levels = [tuple(name for name in level if name not in unnamed) for level in ORDER]
    assert written == [level for level in levels if level]


def test_every_letter_stands_for_one_dimension() -> None:
    letters = [row[0] for row in table("docs/notation.md", "letter")]
    assert letters == list(dict.fromkeys(letters))
    assert all(re.fullmatch("[A-Z]", letter) for letter in letters)


def test_every_word_is_explained_once() -> None:
    words = [row[0] for row in table("docs/notation.md", "word")]
    assert len(words) > 20
    assert words == list(dict.fromkeys(words))


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("# (R, V)", "RV"),
        ("# (..., 2 * F) -> (B, T, K, D)", "FBTKD"),
        ("# (N,)", "N"),
        ("`scores`: (R, V) float32", "RV"),
        ("# (Q, n)", "Q"),
        ("# f(X) and (see A) and A, B", ""),
        ("# (M is not a shape, N neither)", ""),
    ],
)
def test_letters_of_a_shape_are_found(text: str, letters: str) -> None:
    assert shape_letters(text) == set(letters)


@pytest.mark.parametrize("text", ["x = 1  # (Q, V)", '"""(Q, V)"""', "q_BQ = 1"])
def test_an_unknown_letter_is_found(text: str) -> None:
    assert len(unknown_letters({"a.py": text}, {"V", "B"})) == 1
