"""Each call answers each argument alike of other kinds of models, and of messages.

`test_faces.py` asks decoders by their own layers; here the models are wrapped, or have an encoder,
or recurrent layers, and a decoder is asked by messages too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, RequestError
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.faces.refusals import reasons
from tests.faces.table import (
    FACES,
    TOKENIZER,
    TYPED,
    Asked,
    Cell,
    Tokens,
    arguments,
    given_for,
    score_of,
)
from tests.faces.test_faces import require_reason, tried
from tests.faces.tight import SUBJECTS, TightCell, plain_of, reference_of
from tests.matrix.rows import ROWS

DRAWN, ALL = 100, 3000
OWN = ("decoder", "window of one")
"""Models that `test_faces.py` asks, or that differ from them in their layers alone."""


class KindCell(NamedTuple):
    """What is asked, how, of which kind of model."""

    face: str
    argument: str | None
    subject: str
    prompt: str
    executor: str

    def __str__(self) -> str:
        return ", ".join(map(str, self))

    @property
    def prompted(self) -> TightCell:
        """The model with its prompt."""
        return TightCell(self.face, self.subject, self.executor, self.prompt, ROWS[0], ())

    def given(self) -> dict[str, Any]:
        """The keywords, anew for each call."""
        cell = Cell(self.face, self.argument, self.prompt, self.executor)
        plain, length = plain_of(self.subject, self.executor, self.prompt)
        given = given_for(cell, self.prompted.model, plain)
        if self.argument == "max_length":  # which counts the prompt, too
            given["max_length"] = length + 3
        elif self.argument == "min_length":
            given["min_length"] = length + 5
        elif self.argument == "steer" and self.subject in OWN:  # with a vector of its own width
            given["steer"] = {0: 9 * torch.ones(self.prompted.model.config.hidden_size)}
        # An answer to messages is drawn unless somebody says how it is chosen.
        return {"do_sample": False, **given} if self.prompt == "messages" else given


def kind_cells() -> Iterator[KindCell]:
    """Every cell; the command line takes texts, and what it has options for."""
    for subject, kind in SUBJECTS.items():
        prompts = ("messages",) if subject in OWN else kind.prompts
        for argument in (None, *arguments()):
            for face in list(FACES)[1:]:
                for prompt in prompts:
                    typed = prompt == "text" and (argument is None or argument in TYPED)
                    if face != "the command line" or typed:
                        for executor in kind.executors:
                            yield KindCell(face, argument, subject, prompt, executor)


CELLS = [*kind_cells()]
_DRAWN = random.Random(9).sample(CELLS, ALL)
# Each face has a cell among the first.
SHUFFLED = [*dict.fromkeys([*{cell.face: cell for cell in _DRAWN}.values(), *_DRAWN])]
SAMPLE = SHUFFLED[:DRAWN]


def first(cell: KindCell) -> Tokens:
    """The tokens of `model.generate`."""
    prompted = cell.prompted
    given = {"tokenizer": TOKENIZER, **cell.given(), "return_dict_in_generate": True}
    found = prompted.model.generate(**{**prompted.rows(), **given}).new_tokens
    return [[*one] for one in found if one]


def check(cell: KindCell, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    prompted = cell.prompted
    if cell.face == "the command line":
        loaded = prompted.model, TOKENIZER
        monkeypatch.setattr(es, "load", lambda *_, **__: loaded, raising=False)

    def asked() -> Tokens:
        one = Asked(prompted.model, cell.prompt, cell.given(), call, prompted)
        return [[*tokens] for tokens in FACES[cell.face](one) if tokens]

    wanted, found = tried(lambda: first(cell)), tried(asked)
    for face, one in (("model.generate", wanted), (cell.face, found)):
        expected = [*reasons(face, cell.argument, cell.prompt, cell.subject)]
        assert isinstance(one, EverystepError) == bool(expected), f"{face}: {one}, {expected}"
        if isinstance(one, EverystepError):
            require_reason(one, expected)
    if not isinstance(found, EverystepError) and not isinstance(wanted, EverystepError):
        repeated = cell.subject == "listener" and cell.argument == "num_return_sequences"
        assert (found[:1] * len(found) if repeated else found) == wanted


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_cell_has_the_tokens_of_the_first_call(
    cell: KindCell,
    call: Caller,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(cell, call, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cell", SHUFFLED[DRAWN:], ids=str)
def test_many_cells_have(
    cell: KindCell,
    call: Caller,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check(cell, call, monkeypatch)


@pytest.mark.filterwarnings("ignore")
def test_a_transcription_repeats_its_best_answer_as_the_reference_does() -> None:
    cell = KindCell("es.generate", "num_return_sequences", "listener", "sounds", "torch")
    theirs = reference_of("listener", whole=True).generate(**cell.prompted.rows(), **cell.given())
    best, other = first(cell)
    assert best == other and theirs[:, -len(best) :].tolist() == [best, other]


def test_the_table_is_whole() -> None:
    assert {cell.argument for cell in CELLS} == {None, *arguments()}
    assert {cell.subject for cell in CELLS} == {*SUBJECTS}
    assert {cell.face for cell in SAMPLE} == {*FACES} - {"model.generate"}
    for subject, kind in SUBJECTS.items():
        asked = {cell.prompt for cell in CELLS if cell.subject == subject}
        assert asked == ({"messages"} if subject in OWN else {*kind.prompts})


def test_a_call_that_forgets_an_argument_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = KindCell("es.generate", "suppress_tokens", "encoder-decoder", "ids", "auto")
    plain = FACES[cell.face]
    monkeypatch.setitem(FACES, cell.face, lambda asked: plain(replace(asked, given=_base(asked))))
    with pytest.raises(AssertionError):
        check(cell, None, monkeypatch)  # type: ignore[arg-type]


def _base(asked: Asked) -> dict[str, Any]:
    return {name: one for name, one in asked.given.items() if name != "suppress_tokens"}


def scored_cells() -> Iterator[tuple[str, str]]:
    for subject, kind in SUBJECTS.items():
        yield from ((subject, prompt) for prompt in kind.prompts if "embeds" not in prompt)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("subject", "prompt"), [*scored_cells()])
def test_a_score_is_that_of_what_was_generated(subject: str, prompt: str) -> None:
    executor = SUBJECTS[subject].executors[-1]
    cell = KindCell("es.score", None, subject, prompt, executor).prompted
    given: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "do_sample": False}
    asked = Asked(cell.model, prompt, given, own=cell)
    given = {**given, "logprobs": 0, "return_dict_in_generate": True, "pad_token_id": 0}
    try:
        (one,) = es.generate(cell.model, TOKENIZER, [cell.content()], **given)
    except EverystepError as error:
        require_reason(error, [*reasons("es.generate", None, prompt, subject)])
        return
    if prompt == "holes" and "encoder" not in subject:
        with pytest.raises(RequestError, match="a text is scored after ids alone"):
            score_of(asked, [*one.tokens])
        return
    found = score_of(asked, [*one.tokens]).logprobs.tolist()
    assert found == pytest.approx(one.logprobs.logprobs.tolist(), abs=1e-4)
