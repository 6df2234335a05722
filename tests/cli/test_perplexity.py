"""`everystep perplexity`: the figures are the library's, and wrong input is explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import everystep as es
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model

TEXT = "the cat sat on the mat and looked at the dog " * 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole tiny model, and a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    return write_tiny_model(tmp_path / "tiny")


def test_the_figures_are_the_librarys(folder: Path, call: Caller) -> None:
    line = ("perplexity", str(folder.parent / "text.txt"), "-m", str(folder), "--window", "16")
    outcome = call(*line, "--stride", "9", "--json")
    found = json.loads(outcome.out)
    score = es.score(*es.load(folder), TEXT.removesuffix("\n"), window=16, stride=9)
    assert (outcome.code, found["tokens"]) == (0, len(score.tokens))
    assert found["perplexity"] == pytest.approx(score.perplexity)
    assert found["bits_per_byte"] == pytest.approx(score.bits_per_byte)
    assert (found["window"], found["stride"]) == (16, 9)
    cells = call(*line).out.rstrip("\n").split("\t")
    assert cells[0] == str(len(score.tokens)) and cells[3:5] == ["16", "12"]
    assert call("perplexity", "-", *line[2:], given=TEXT.encode()).out.split("\t")[:5] == cells[:5]


@pytest.mark.parametrize(
    "data, options, code, part",
    [
        (None, (), 1, "there is no file"),
        (b"\xff\xfe", (), 1, "not UTF-8"),
        (b"", (), 2, "nothing to score"),
        (b"some text", ("--window", "1"), 2, "window is impossible"),
        (b"some text", ("--window", "8", "--stride", "9"), 2, "stride is impossible"),
    ],
)
def test_what_cannot_be_scored_is_explained(
    folder: Path,
    call: Caller,
    data: bytes | None,
    options: tuple[str, ...],
    code: int,
    part: str,
) -> None:
    path = folder.parent / "given.txt"
    if data is not None:
        path.write_bytes(data)
    outcome = call("perplexity", str(path), "-m", str(folder), *options)
    assert (outcome.code, outcome.out) == (code, "")
    assert part in outcome.err and outcome.err.startswith("everystep: ")
