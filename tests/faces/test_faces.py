"""Each call answers each argument alike, of whatever prompt and on whatever executor."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import everystep as es
from everystep.errors import EverystepError, RequestError
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.faces.refusals import Reason, reasons
from tests.faces.table import (
    EXECUTORS,
    FACES,
    PROMPTS,
    SCORED,
    SCORED_AFTER,
    TOKENIZER,
    Asked,
    Cell,
    Tokens,
    arguments,
    cells,
    given_for,
    model_of,
    rectangle,
    score_of,
)
from tests.switching.arguments import ASKED

CELLS = [*cells()]
DRAWN = 100
SAMPLE = random.Random(7).sample(CELLS, DRAWN)
MODELS = {name: model_of(name) for name in EXECUTORS}


def tried(ask: Callable[[], Tokens]) -> Tokens | EverystepError:
    """The tokens of a call, or why it is refused."""
    try:
        return ask()
    except EverystepError as error:
        return error


def require_reason(error: EverystepError, expected: list[Reason]) -> None:
    """The error gives a reason that is expected, and the guide gives it too."""
    (fitting, *_) = [one for one in expected if one.fits(error)] or [None]
    assert fitting is not None, f"expected {expected}, got {error}"
    assert fitting.told, f"{fitting.page} does not say: {fitting.words}"


def check(cell: Cell, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    model = MODELS[cell.executor]

    def asked() -> Asked:  # anew for each call: caches, streamers and their like are used up
        return Asked(model, cell.prompt, given_for(cell, model), call)

    if cell.face == "the command line":
        monkeypatch.setattr(es, "load", lambda *_, **__: (model, TOKENIZER), raising=False)
    wanted, found = tried(lambda: rectangle(asked())), tried(lambda: FACES[cell.face](asked()))
    for face, one in (("model.generate", wanted), (cell.face, found)):
        expected = [*reasons(face, cell.argument, cell.prompt)]
        assert isinstance(one, EverystepError) == bool(expected), f"{face}: {one}, {expected}"
        if isinstance(one, EverystepError):
            require_reason(one, expected)
    if not isinstance(found, EverystepError):
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


@pytest.mark.parametrize("argument", [None, *SCORED])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_score_is_that_of_what_was_generated(
    executor: str, prompt: str, argument: str | None
) -> None:
    model = MODELS[executor]
    changed = {} if argument is None else {argument: ASKED[argument][0]}
    asked = Asked(model, prompt, {"max_new_tokens": 6, "eos_token_id": None, **changed})
    given: dict[str, Any] = {**asked.given, "logprobs": 0, "return_dict_in_generate": True}
    (one,) = es.generate(model, TOKENIZER, [asked.content()], **given)
    if "embeds" in prompt:
        with pytest.raises(RequestError, match="a text is scored after ids alone"):
            score_of(asked, [*one.tokens])
        return
    score = score_of(asked, [*one.tokens])
    assert score.tokens.tolist() == [*one.tokens]
    assert score.logprobs.tolist() == pytest.approx([*one.logprobs.logprobs.tolist()], abs=1e-4)
    if argument is not None:  # which changes how likely it is
        plain = score_of(replace(asked, given={}), [*one.tokens])
        assert abs(plain.total - score.total) > 1e-3


@pytest.mark.parametrize("name", sorted({*arguments()} - {*SCORED, *SCORED_AFTER}))
def test_a_score_knows_no_argument_about_choices(name: str) -> None:
    known = inspect.signature(es.score).parameters
    assert name not in known


@pytest.mark.parametrize("wrong", ["another reason", "none expected", "not refused"])
def test_a_refusal_for_another_reason_is_noticed(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("es.generate", "use_cache", "ids", "torch")
    if wrong == "another reason":

        def refused(asked: Asked) -> Tokens:
            raise RequestError("use_cache is unknown", do="Leave use_cache out")

        monkeypatch.setitem(FACES, cell.face, refused)
    elif wrong == "none expected":
        monkeypatch.setattr("tests.faces.test_faces.reasons", lambda *_: ())
    else:
        monkeypatch.setitem(FACES, cell.face, lambda asked: rectangle(asked))
    with pytest.raises(AssertionError):
        check(cell, None, monkeypatch)  # type: ignore[arg-type]
