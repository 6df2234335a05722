"""A strategy of the caller's: by name or as a value, from every face, as the guide builds one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnknownArgumentError
from everystep.strategies import Beam, Greedy, base
from everystep.testing.models import tiny_llama
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model
from tests.distributions import distribution
from tests.docs.test_documents import blocks
from tests.reading import ROOT

GUIDE = (ROOT / "docs" / "guide" / "your_own_strategy.md").read_text(encoding="utf-8")
NAME = "where_unsure"
IDS = [5, 6, 7, 5, 6, 7, 5, 6]
ASKED: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None, "seed": [3]}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it was afterwards, and without what another test has registered."""
    names = {name: kind for name, kind in base._REGISTERED.items() if name != NAME}
    monkeypatch.setattr(base, "_REGISTERED", names)
    yield


@pytest.fixture
def guide(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module for the guide's file."""
    module = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", module)
    return module


@pytest.fixture
def kind(guide: ModuleType) -> Any:
    """The class of the guide, which is registered when its file is run."""
    exec(blocks(GUIDE, "python")[0].text, vars(guide))
    return guide.WhereUnsure


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(monkeypatch, capsys)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def by_the_book(model: LanguageModel, sure: float) -> list[int]:
    """A whole forward per token; the draws are those of a seeded sampling request."""
    request = _request(model)
    tokens: list[int] = []
    from everystep.types import Scores
    from tests.judges.textbook import Prefix

    prefix = Prefix(request, None)  # type: ignore[arg-type]
    while len(tokens) < 10:
        with torch.no_grad():
            scores = model(torch.tensor([[*IDS, *tokens]]), use_cache=False).logits[0, -1].float()
        best = scores.softmax(-1).max(-1)
        drawn = request.draws.choose(Scores.of(scores[None]), prefix.places(tokens, 0))
        tokens.append(int(best.indices) if best.values >= sure else int(drawn))
    return tokens


def _request(model: LanguageModel) -> Any:
    from everystep.drivers.session import Session

    options = {key: value for key, value in ASKED.items() if key != "seed"}
    session = Session(model, None, [""], None, [3], options)
    return session.prepared(session.read(IDS, 0), 0).requests[0]


def test_the_guides_file_has_forty_lines() -> None:
    assert blocks(GUIDE, "python")[0].text.count("\n") <= 42


@pytest.mark.parametrize("sure", [0.0, 0.2, 0.5, 1.1])
def test_it_is_its_textbook(kind: Any, model: LanguageModel, sure: float) -> None:
    wanted = by_the_book(model, sure)
    assert es.generate(model, None, [IDS], strategy=kind(sure), **ASKED) == [wanted]
    named = {"strategy": NAME, "strategy_options": {"sure": sure}}
    assert es.generate(model, None, [IDS], **named, **ASKED) == [wanted]
    out = model.generate(torch.tensor([IDS]), **named, **ASKED)
    assert out[0, len(IDS) :].tolist() == wanted


def test_both_ways_to_choose_are_taken(kind: Any, model: LanguageModel) -> None:
    sampled = {"do_sample": True, "top_k": 0}
    assert by_the_book(model, 0.0) == es.generate(model, None, [IDS], **ASKED)[0]
    assert by_the_book(model, 1.1) == es.generate(model, None, [IDS], **sampled, **ASKED)[0]
    assert by_the_book(model, 0.2) not in (by_the_book(model, 0.0), by_the_book(model, 1.1))


def test_every_face_takes_it(kind: Any, model: LanguageModel, tmp_path: Path) -> None:
    wanted = tuple(by_the_book(model, 0.2))
    for asked in (
        {**ASKED, "strategy": NAME, "strategy_options": {"sure": 0.2}},
        {**ASKED, "strategy": kind(0.2)},
    ):
        stream = es.stream(model, None, [IDS], **asked)
        assert tuple(event.token for event in stream) == wanted
        run = es.open(model, None, IDS, **asked)
        next(run)
        run.save(tmp_path / "a.run")
        again = {name: value for name, value in asked.items() if not isinstance(value, str)}
        again = {"strategy": again["strategy"]} if "strategy" in again else {}
        resumed = es.resume(tmp_path / "a.run", model, **again)
        assert run.fork().result().tokens == resumed.result().tokens == wanted
        assert run.explain(0).chosen.token == wanted[0]

        async def told(asked: dict[str, Any] = asked) -> Any:
            async with es.AsyncEngine(model) as engine:
                return await engine.generate(IDS, **{**asked, "seed": 3})

        expected = es.generate(model, None, IDS, **{**asked, "seed": [3]})
        assert asyncio.run(told()) == expected


def test_it_goes_with_drafts_and_samplers(kind: Any, model: LanguageModel) -> None:
    asked = {**ASKED, "strategy": kind(0.2), "return_dict_in_generate": True}
    ids = torch.tensor([IDS])
    drafts = {"prompt_lookup_num_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    drafted = model.generate(ids, **drafts, **asked)
    assert drafted.new_tokens == [by_the_book(model, 0.2)]
    assert drafted.speculation["drafted"] > 0
    best = model.generate(ids, do_sample=True, top_k=1, **asked)
    assert best.new_tokens == [by_the_book(model, 0.0)]


def test_it_draws_alike_in_any_batch(kind: Any, model: LanguageModel) -> None:
    asked = {**ASKED, "strategy": kind(0.2)}
    prompts = [IDS, IDS[:3], IDS[::-1]]
    together = es.generate(model, None, prompts, **{**asked, "seed": [3, 4, 5]})
    for prompt, seed, found in zip(prompts, (3, 4, 5), together, strict=True):
        assert es.generate(model, None, [prompt], **{**asked, "seed": [seed]}) == [found]
    assert es.generate(model, None, [IDS], **{**asked, "seed": [9]}) != together[:1]


def test_a_search_of_the_callers_is_one(model: LanguageModel) -> None:
    """Any value with the members will do, also one of the library's classes."""
    asked = {**ASKED, "return_dict_in_generate": True}
    (wanted,) = es.generate(model, None, [IDS], num_beams=40, **asked)
    (found,) = es.generate(model, None, [IDS], strategy=Beam(40, max_new=10), **asked)
    assert (found.tokens, found.score) == (wanted.tokens, wanted.score)


def test_a_second_definition_takes_the_place_of_the_first(
    kind: Any, guide: ModuleType, model: LanguageModel
) -> None:
    """As where a cell of a notebook is run again."""
    text = blocks(GUIDE, "python")[0].text.replace("sure: float = 0.6", "sure: float = 0")
    exec(text, vars(guide))
    assert base.strategy_named(NAME) is guide.WhereUnsure is not kind
    found = es.generate(model, None, [IDS], strategy=NAME, **ASKED)
    assert found == [by_the_book(model, 0.0)]


class Forgetful(Greedy):
    """A strategy without an equal, and so without a hash."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"strategy": "where_unsur"},
            r"wanted assisted, beam.*guided.*where_unsure.*meant where_unsure",
        ),
        ({"strategy": "zzz"}, "no strategy is called 'zzz'.*Install the package"),
        ({"strategy": Greedy}, "this is no strategy.*the class"),
        ({"strategy": 5}, "without width"),
        ({"strategy": Forgetful()}, "must never change"),
        ({"strategy": NAME, "num_beams": 4}, "num_beams belongs to"),
        ({"strategy": NAME, "strategy_options": {"sur": 1}}, "cannot be made.*'sur'"),
        ({"strategy": NAME, "strategy_options": [1]}, "another kind"),
        ({"strategy": "beam", "strategy_options": {"width": 3}}, "of another package"),
        ({"strategy_options": {"sure": 0.5}}, "of another package"),
        ({"strategy": "greedy", "do_sample": True}, "do_sample contradicts"),
        ({"strategy": "contrastive", "num_beams": 2}, "num_beams contradicts"),
        ({"strategy": "greedy", "penalty_alpha": 0.6}, "penalty_alpha contradicts"),
        ({"strategy": Beam(3), "prompt_lookup_num_tokens": 3}, "alone=True"),
    ],
)
def test_what_cannot_be_is_refused(
    kind: Any, model: LanguageModel, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=f"(?s){words}"):
        es.generate(model, None, [IDS], **given, **ASKED)


def test_names_stand_for_fields(model: LanguageModel) -> None:
    for name, fields in {
        "greedy": {"do_sample": False},
        "sample": {"do_sample": True},
        "beam": {"num_beams": 4},
        "beam-sample": {"num_beams": 4, "do_sample": True},
        "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
        "guided": {"guidance_scale": 1.5},
        "lookup": {"prompt_lookup_num_tokens": 10},
    }.items():
        wanted = es.generate(model, None, [IDS], **fields, **ASKED)
        assert es.generate(model, None, [IDS], strategy=name, **ASKED) == wanted, name
    without_effect = {"penalty_alpha": 0.0, "num_beam_groups": 1, "do_sample": False}
    wanted = es.generate(model, None, [IDS], **ASKED)
    assert es.generate(model, None, [IDS], strategy="greedy", **without_effect, **ASKED) == wanted
    inherited = es.GenerationConfig(num_beams=3, do_sample=True)
    found = es.generate(model, None, [IDS], strategy="greedy", generation_config=inherited, **ASKED)
    assert found == wanted


# --- from the command line ------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's file as a distribution, as an installer leaves it."""
    section = blocks(GUIDE, "toml")[0].text.partition('."everystep.strategies"]\n')[2]
    name, _, value = section.replace('"', "").strip().partition(" = ")
    source = blocks(GUIDE, "python")[0].text
    distribution(tmp_path, "where_unsure", source, {"everystep.strategies": {name: value}})
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("installed")
def test_the_command_line_finds_an_installed_one(call: Caller, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    said = ["generate", "abcabc", "-m", str(folder), "--seed", "3", "-n", "6", "--json"]
    outcome = call(*said, "--strategy", NAME, "--strategy-option", "sure=0.05")
    assert (outcome.code, outcome.err) == (0, "")
    (found,) = json.loads(outcome.out)["results"]
    model, tokenizer = es.load(folder)
    named = {"strategy": NAME, "strategy_options": {"sure": 0.05}, "return_dict_in_generate": True}
    asked = {"seed": 3, "max_new_tokens": 6, **named}
    assert found["tokens"] == [*es.generate(model, tokenizer, "abcabc", **asked).tokens]
    assert found["tokens"] != [
        *es.generate(model, tokenizer, "abcabc", **{**asked, "strategy_options": {}}).tokens
    ]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["--strategy", "gredy"], "no strategy is called 'gredy'; wanted assisted, beam, "),
        (["--strategy", "gredy"], "beam, beam_sample"),
        (["--strategy", "gredy"], "Perhaps you meant greedy"),
        (["--strategy", "greedy", "--num-beams", "4"], "--num-beams contradicts"),
        (["--strategy", "greedy", "--temperature", "0.5"], "--temperature has no effect"),
        (["--strategy", "beam", "--strategy-option", "a=1"], "of another package"),
        (["--strategy-option", "a=1"], "of another package"),
        (["--strategy", NAME, "--strategy-option", "sure"], "NAME=VALUE"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_a_wrong_strategy_is_refused_before_the_model_is_loaded(
    call: Caller, said: list[str], words: str
) -> None:
    outcome = call("generate", "Why?", "-m", "/nowhere", *said)
    assert outcome.code == 2 and words in outcome.err


def test_help_lists_them(call: Caller) -> None:
    shown = "".join(call("generate", "--help").out.split())
    for name in ("greedy", "beam_sample", "contrastive", "guided", "lookup"):
        assert name in shown


def test_unknown_is_an_unknown_argument(model: LanguageModel) -> None:
    with pytest.raises(UnknownArgumentError):
        es.generate(model, None, [IDS], strategy="nothing", **ASKED)
