"""Each face says where something is tight what the first one says, and what can be the only answer.

The models are decoders, recurrent ones and ones with an encoder, by their own layers and wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

import everystep as es
from everystep.errors import EverystepError
from tests.cli.conftest import call  # noqa: F401  (a fixture)
from tests.cli.running import Caller
from tests.faces.table import FACES, TOKENIZER, Asked, Tokens
from tests.faces.tight import FEATURES, SUBJECTS, TightCell, drawn, reference_of
from tests.matrix.rows import ROWS
from tests.reading import ROOT

DRAWN, ALL = 300, 3000
GUIDE = ROOT / "docs/guide/models.md"


@cache
def reasons() -> tuple[str, ...]:
    """What the guide about models says that errors say."""
    table = GUIDE.read_text(encoding="utf-8").split("### What is refused")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    rules = (ROOT / "docs/guide/configuration.md").read_text(encoding="utf-8").splitlines()
    rows += [line.split(" | ") for line in rules if " | conflict | " in line]
    return tuple(row[-1].removesuffix(" |") for row in rows[2:])


def first(cell: TightCell) -> Tokens:
    """The tokens of `model.generate`."""
    given = {**cell.given(), "tokenizer": TOKENIZER, "return_dict_in_generate": True}
    return of_rows(cell.model.generate(**cell.rows(), **given).new_tokens)


def of_rows(found: Tokens) -> Tokens:
    """The hypotheses that there are: a search in which none could end has an empty one."""
    return [[*one] for one in found if one]


def tried(ask: Callable[[], Tokens]) -> Tokens | EverystepError:
    """The tokens of a call, or why it is refused."""
    try:
        return ask()
    except EverystepError as error:
        return error


def check(cell: TightCell, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    if cell.face == "the command line":
        loaded = cell.model, TOKENIZER
        monkeypatch.setattr(es, "load", lambda *_, **__: loaded, raising=False)

    def asked() -> Tokens:
        return of_rows(FACES[cell.face](Asked(cell.model, cell.prompt, cell.given(), call, cell)))

    wanted, found = tried(lambda: first(cell)), tried(asked)
    for one in (wanted, found):
        if isinstance(one, EverystepError):
            assert any(reason in str(one) for reason in reasons()), f"no guide says why: {one}"
    if isinstance(found, EverystepError):
        return
    if isinstance(wanted, EverystepError):  # of a rectangle alone
        assert any(words in str(wanted) for words in OF_RECTANGLES)
    else:
        assert found == wanted
    for name in cell.features:
        if not cell.frees(name):
            texts = [TOKENIZER.decode(one, skip_special_tokens=True) for one in found]
            assert all(map(FEATURES[name].claim, found, texts)), name


OF_RECTANGLES = ("sounds are sampled at a temperature", "cannot be truncated")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(DRAWN))
def test_a_tight_cell(seed: int, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    check(drawn(seed), call, monkeypatch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(DRAWN, ALL))
def test_every_tight_cell(seed: int, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    check(drawn(seed), call, monkeypatch)


def test_cells_of_every_kind_are_drawn() -> None:
    cells = [drawn(seed) for seed in range(DRAWN)]
    assert {cell.face for cell in cells} == {*FACES} - {"model.generate"}
    assert {cell.subject for cell in cells} == {*SUBJECTS}
    assert {name for cell in cells for name in cell.features} == {*FEATURES}
    assert {cell.strategy.name for cell in cells} == {row.name for row in ROWS}
    assert {cell.prompt for cell in cells} == {
        name for subject in SUBJECTS.values() for name in subject.prompts
    }


def test_a_face_that_forgets_a_feature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = TightCell("es.generate", "decoder", "torch", "ids", ROWS[0], ("one choice",))
    monkeypatch.setitem(FACES, cell.face, lambda asked: [[5, 6]])
    with pytest.raises(AssertionError):
        check(cell, None, monkeypatch)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_length_of_a_transcription_counts_no_start() -> None:
    cell = TightCell("es.generate", "listener", "torch", "sounds", ROWS[0], ())
    given = {"max_length": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = cell.model.generate(**cell.rows(), **given)
    theirs = reference_of("listener", whole=True).generate(**cell.rows(), **given)
    assert found.tolist() == theirs.tolist() and found.shape == (1, 3)
    (tokens,) = es.generate(cell.model, None, [cell.content()], **given)
    assert [*tokens] == found[0, :2].tolist()
