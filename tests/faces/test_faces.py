"""Each call answers each argument alike, of whatever prompt and on whatever executor."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import everystep as es
from everystep.errors import EverystepError
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.faces.table import (
    EXECUTORS,
    FACES,
    TOKENIZER,
    Asked,
    Cell,
    Tokens,
    arguments,
    cells,
    given_for,
    model_of,
    rectangle,
)

GUIDES = Path(__file__).parents[2] / "docs/guide"
CELLS = [*cells()]
DRAWN = 100
SAMPLE = random.Random(7).sample(CELLS, DRAWN)
MODELS = {name: model_of(name) for name in EXECUTORS}


@cache
def guides() -> str:
    return "".join(path.read_text() for path in sorted(GUIDES.glob("*.md")))


def first(asked: Asked) -> Tokens | None:
    """The tokens of `model.generate`, None where it refuses the call."""
    try:
        return rectangle(asked)
    except EverystepError:
        return None


def check(cell: Cell, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = MODELS[cell.executor]

    def asked() -> Asked:  # anew for each call: caches, streamers and their like are used up
        return Asked(model, cell.prompt, given_for(cell, model), call)

    wanted = first(asked())
    if cell.face == "the command line":
        monkeypatch.setattr(es, "load", lambda *_, **__: (model, TOKENIZER), raising=False)
    try:
        found = FACES[cell.face](asked())
    except EverystepError as error:
        known = cell.argument is None or f"`{cell.argument}" in guides()
        assert wanted is None or known, f"no guide says why: {error}"
        return
    assert found == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_cell_has_the_tokens_of_the_first_call(
    cell: Cell,
    call: Caller,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(cell, call, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_every_cell_has(
    cell: Cell,
    call: Caller,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(cell, call, monkeypatch)


def test_the_table_is_whole() -> None:
    assert {cell.argument for cell in CELLS} == {None, *arguments()}
    assert {cell.face for cell in CELLS} == {*FACES} - {"model.generate"}


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_score_is_that_of_what_was_generated(executor: str) -> None:
    asked = Asked(MODELS[executor], "ids", {"max_new_tokens": 6, "eos_token_id": None})
    given: dict[str, Any] = {**asked.given, "logprobs": 0, "return_dict_in_generate": True}
    (one,) = es.generate(asked.model, TOKENIZER, [asked.content()], **given)
    score = es.score(asked.model, TOKENIZER, [*one.tokens], after=asked.content())
    assert score.tokens.tolist() == [*one.tokens]
    assert score.logprobs.tolist() == pytest.approx([*one.logprobs.logprobs.tolist()], abs=1e-4)
