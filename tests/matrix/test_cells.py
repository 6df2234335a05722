"""Each cell of the matrix: a strategy with a feature is as it should be, or is refused in time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.api.model import LanguageModel
from everystep.config.named_strategies import NAMED
from everystep.engine import Engine
from everystep.errors import EverystepError
from tests.faces.tight import SUBJECTS
from tests.matrix.columns import COLUMNS
from tests.matrix.models import ON_MODELS, try_tight
from tests.matrix.on_models import (
    FEATURES_ON_MODELS,
    REFUSED_ON_MODELS,
    OneAnswer,
    some,
    strategies,
    try_on,
)
from tests.matrix.page import PAGE, page
from tests.matrix.rows import APART, REFUSED, ROWS, Row
from tests.matrix.subjects import PLAIN, RECURRENT, SEED, SINGLE, Subject, plain

MOST_REFUSED = 10


def named(name: str) -> Row:
    """The row of this name."""
    return next(row for row in ROWS if row.name == name)


def cells() -> Iterator[Any]:
    """Every cell with a meaning."""
    for row in ROWS:
        for feature in COLUMNS:
            if (row.name, feature) not in APART:
                marks = [pytest.mark.native] if feature == "native executor" else []
                yield pytest.param(row, feature, marks=marks, id=f"{row.name}, {feature}")


@pytest.mark.parametrize(("row", "feature"), [*cells()])
def test_cell(row: Row, feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = REFUSED.get((row.name, feature))
    if refusal is None:
        COLUMNS[feature](row, tmp_path)
        return
    plain(row)  # what the check compares with may be computed
    for kind, name in ((Engine, "step"), (LanguageModel, "__call__")):
        monkeypatch.setattr(kind, name, _computed)
    with pytest.raises(EverystepError, match=refusal.words):
        COLUMNS[feature](row, tmp_path)


def _computed(*_: object) -> None:
    raise AssertionError("something was computed before the call was refused")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", SUBJECTS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_one_answer_is_left_on_every_kind_of_model(row: Row, model: str) -> None:
    refusal = ON_MODELS.get((row.name, model))
    if refusal is None:
        try_tight(row, model)
        return
    with pytest.raises(EverystepError, match=refusal.words):
        try_tight(row, model)


ON = [(feature, model) for feature in FEATURES_ON_MODELS for model in SUBJECTS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("feature", "model"), ON)
def test_one_answer_is_left_with_a_feature(feature: str, model: str, tmp_path: Path) -> None:
    try_on(feature, model, some(feature, model), tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("feature", "model"), ON)
def test_each_strategy_says_it_with_a_feature(feature: str, model: str, tmp_path: Path) -> None:
    try_on(feature, model, strategies(feature, model), tmp_path)


def test_a_feature_that_says_something_else_is_noticed(tmp_path: Path) -> None:
    other = OneAnswer(named("greedy"), "decoder", "torch")
    with pytest.raises(AssertionError):
        other.say(choices=["no"])


@pytest.mark.parametrize("name", ["lookup", "assisted", "early_exit"])
def test_rows_about_drafts_draft(name: str) -> None:
    asked = PLAIN.options(named(name))
    out = PLAIN.model.generate(torch.tensor([PLAIN.ids]), seed=[SEED], **asked)
    assert out.speculation["drafted"] > 0
    if name != "lookup":  # of what a tiny model says, nothing was said before
        assert 0 < out.speculation["accepted"] < out.speculation["drafted"]


@pytest.mark.parametrize("subject", [PLAIN, SINGLE, RECURRENT])
def test_the_best_of_several_is_not_the_first(subject: Subject) -> None:
    asked = named("best_of").options
    first = Row("sample", {"strategy": "sample", "temperature": asked["temperature"]})
    assert plain(named("best_of"), subject)[0].tokens != subject.say(first)[0].tokens


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.matrix.page"


def test_every_exception_is_a_cell() -> None:
    every = {(row.name, feature) for row in ROWS for feature in COLUMNS}
    assert APART.keys() <= every and REFUSED.keys() <= every
    assert not APART.keys() & REFUSED.keys()
    assert FEATURES_ON_MODELS.keys() <= COLUMNS.keys() and {*ON} >= REFUSED_ON_MODELS.keys()
    for row in ROWS:  # each is tried by default, too
        assert any(row in some(feature, model) for feature, model in ON)


def test_few_cells_are_refused() -> None:
    assert len(REFUSED) <= MOST_REFUSED


def test_every_named_strategy_is_a_row() -> None:
    assert {row.name for row in ROWS} == {*NAMED}
