"""Lines on a terminal end between words, whatever pieces a text comes in."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len

from everystep.cli.wrapping import Wrapped
from tests.cli.running import on_terminal, program, run

TEXT = "The quick brown fox  jumps over\nthe lazy dog,\n\n    and sleeps. Immeasurably so.\n"


def shown(pieces: list[str], columns: int) -> str:
    wrapped = Wrapped(columns)
    return "".join(map(wrapped, pieces)) + wrapped.rest()


def test_a_line_ends_before_the_word_that_does_not_fit() -> None:
    assert shown(["one two three"], 8) == "one two\nthree"
    assert shown(["one two three"], 7) == "one two\nthree"
    assert shown(["one two three"], 13) == "one two three"


@pytest.mark.parametrize("columns", [14, 20, 40])
def test_pieces_make_no_difference(columns: int) -> None:
    whole = shown([TEXT], columns)
    assert whole.split() == TEXT.split()
    assert max(map(cell_len, whole.split("\n"))) <= columns
    for seed in range(20):
        places = sorted(random.Random(seed).sample(range(len(TEXT)), 9))
        pieces = [TEXT[a:b] for a, b in zip([0, *places], [*places, len(TEXT)], strict=True)]
        assert shown(pieces, columns) == whole


def test_where_there_is_room_nothing_changes() -> None:
    assert shown([TEXT], 80) == TEXT
    assert shown(["a\tb\n\n  c  \n"], 80) == "a\tb\n\n  c\n"


def test_a_word_is_shown_when_it_has_ended() -> None:
    wrapped = Wrapped(20)
    assert [wrapped(piece) for piece in ("one", " t", "wo", "\n")] == ["", "one", "", " two\n"]
    assert wrapped("rest") == "" and wrapped.rest() == "rest"


def test_a_word_longer_than_a_line_begins_a_line_and_is_not_held_back() -> None:
    assert shown(["one abcdefghij two"], 6) == "one\nabcdef\nghij\ntwo"
    assert Wrapped(6)("abcdefghij") == "abcdef"


def test_scripts_without_spaces_break_anywhere() -> None:
    assert shown(["日本語の文章"], 5) == "日本\n語の\n文章"
    assert Wrapped(5)("日") == "日"


def test_a_terminal_gets_lines_that_end_between_words() -> None:
    words = "immeasurable conversations concerning extraordinary mathematicians"
    with on_terminal(program("generate", words), columns=40) as terminal:
        assert terminal.end() == 0
    lines = terminal.shown.splitlines()
    first = next(i for i, line in enumerate(lines) if line.endswith("conversations concerning"))
    assert lines[first + 1] == "extraordinary mathematicians"
    assert "everystep: 5 tokens" in terminal.shown


def test_a_note_ends_its_lines_between_words_too() -> None:
    with on_terminal(program("generate", "a", "--top-p", "7"), columns=30) as terminal:
        assert terminal.end() == 2
    lines = terminal.shown.splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 30
    assert " ".join(lines) == run(program("generate", "a", "--top-p", "7")).err.rstrip("\n")


def test_a_pipe_gets_one_line_however_long() -> None:
    words = " ".join(["word"] * 60)
    assert run(program("generate", words), COLUMNS="20").out == f"{words}\n"
