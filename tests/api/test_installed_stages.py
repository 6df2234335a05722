"""Processors and hooks of installed packages, by name: what they give is what objects give."""

from __future__ import annotations

import asyncio
import importlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError, UnknownArgumentError
from everystep.testing.models import tiny_llama
from tests.cli.running import Caller
from tests.cli.tiny_model import write_tiny_model
from tests.distributions import GROUPS, STAGES, distribution, own_stages
from tests.docs.test_documents import blocks
from tests.reading import ROOT

IDS = [5, 6, 7, 5, 6]
ASKED: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "seed": 3}
FAVOUR = {"name": "favour", "options": {"ids": [9, 11], "by": 50.0}}
INSERT = {"name": "insert", "options": {"ids": [21, 22], "after": 2}}
NAMED: dict[str, Any] = {"logits_processor": [FAVOUR], "hooks": [INSERT]}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_stages(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


def objects() -> dict[str, Any]:
    """What the names stand for, as a caller makes it."""
    own = importlib.import_module("everystep_own_stages")
    return {"logits_processor": [own.Favour([9, 11], 50.0)], "hooks": [own.Insert([21, 22], 2)]}


@pytest.mark.parametrize(
    "how",
    [{}, {"do_sample": True}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "sample", "beam", "lookup"],
)
def test_names_are_objects(model: LanguageModel, how: dict[str, Any]) -> None:
    plain = es.generate(model, None, [IDS], **how, **ASKED)
    for name in NAMED:
        wanted = es.generate(model, None, [IDS], **{name: objects()[name]}, **how, **ASKED)
        assert es.generate(model, None, [IDS], **{name: NAMED[name]}, **how, **ASKED) == wanted
        assert wanted != plain
    both = es.generate(model, None, [IDS], **objects(), **how, **ASKED)
    assert es.generate(model, None, [IDS], **NAMED, **how, **ASKED) == both
    assert both[0][2:4] == [21, 22]


def test_every_face_takes_them(model: LanguageModel) -> None:
    wanted = es.generate(model, None, IDS, **objects(), **ASKED)
    assert [event.token for event in es.stream(model, None, IDS, **NAMED, **ASKED)] == wanted
    assert list(es.open(model, None, IDS, **NAMED, **ASKED).result().tokens) == wanted
    found = model.generate(torch.tensor([IDS]), **NAMED, **ASKED)
    assert found[0, len(IDS) :].tolist() == wanted

    async def told() -> Any:
        async with es.AsyncEngine(model) as engine:
            return await engine.generate(IDS, **NAMED, **ASKED)

    assert asyncio.run(told()) == wanted


def test_names_and_objects_go_together_in_order(model: LanguageModel) -> None:
    """The last processor has the last word."""
    from everystep_own_stages import Favour  # type: ignore[import-not-found]

    ban = Favour([9, 11], -torch.inf)
    for listed in ([FAVOUR, ban], [ban, "favour", FAVOUR]):
        found = es.generate(model, None, IDS, logits_processor=listed, **ASKED)
        assert not {9, 11} & {*found}
    usual = es.generate(model, None, IDS, logits_processor=["favour"], **ASKED)
    assert usual == es.generate(model, None, IDS, logits_processor=(Favour(),), **ASKED)


def test_a_saved_run_has_them_by_name(model: LanguageModel, tmp_path: Path) -> None:
    wanted = es.generate(model, None, IDS, **objects(), **ASKED)
    run = es.open(model, None, IDS, **NAMED, **ASKED)
    next(run)
    run.save(tmp_path / "run")
    again = es.resume(tmp_path / "run", model)
    assert list(again.fork().result().tokens) == list(again.result().tokens) == wanted
    run.set(logits_processor=[])
    assert list(run.result().tokens) != wanted
    mixed = es.open(model, None, IDS, logits_processor=["favour", lambda _, s: s], **ASKED)
    mixed.save(tmp_path / "mixed")
    with pytest.raises(RequestError, match="needs logits_processor"):
        es.resume(tmp_path / "mixed", model)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"logits_processor": ["favor"]}, "not: 'favor'; wanted failing, favour.*meant favour"),
        ({"hooks": ["zzzz"]}, "not: 'zzzz'; wanted insert, no hook. Install the package"),
        ({"hooks": ["favour"]}, "hooks names a hook that there is not"),
        ({"logits_processor": [{"name": "favour", "option": {}}]}, r"\[0\].*meant options"),
        ({"logits_processor": ["favour", {}]}, r"logits_processor\[1\] is impossible"),
        ({"hooks": [{"name": 3}]}, r"hooks\[0\] is impossible; wanted a name"),
        ({"hooks": [{"name": "insert", "options": [1]}]}, r"hooks\[0\] is impossible"),
        ({"hooks": ["insert"]}, "'insert' cannot be made.*'ids'.*Pass others as options"),
        (
            {"logits_processor": [{"name": "favour", "options": {"by": 1e9}}]},
            "'favour' cannot be made.*more than anybody wants",
        ),
        ({"logits_processor": ["lost"]}, "'lost' is installed, but cannot.*AttributeError"),
        ({"hooks": ["no hook"]}, "not a list of hooks.*got Favour"),
        (
            {"logits_processor": [{"name": "no processor", "options": {"ids": [1]}}]},
            "not a list of functions.*got <everystep_own_stages.Insert",
        ),
        ({"logits_processor": "favour"}, "not a list of functions; .*got 'favour'"),
    ],
)
def test_what_cannot_be_is_refused(model: LanguageModel, given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=f"(?s){words}"):
        es.generate(model, None, IDS, **given, **ASKED)


def test_a_name_that_two_packages_have_is_nobodys(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    named = {"everystep.processors": {"favour": "everystep_other_stages:Favour"}}
    distribution(other, "everystep_other_stages", STAGES, named)
    monkeypatch.syspath_prepend(other)
    both = r"several packages have a processor.*everystep_\w+_stages and everystep_\w+_stages"
    with pytest.raises(RequestError, match=both):
        es.generate(model, None, IDS, logits_processor=["favour"], **ASKED)


def test_they_are_gone_where_they_are_not_installed(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.path", [one for one in __import__("sys").path if one != str(tmp_path)])
    with pytest.raises(UnknownArgumentError, match="and none has one"):
        es.generate(model, None, IDS, logits_processor=["favour"], **ASKED)


def test_an_error_of_its_own_ends_its_request_alone(model: LanguageModel) -> None:
    options: Any = [{"logits_processor": ["failing"]}, {}]
    asked = {**ASKED, "return_dict_in_generate": True}
    with pytest.raises(Exception, match="the operator's own") as raised:
        es.generate(model, None, [IDS, IDS], options=options, **asked)
    failed, other = raised.value.results  # type: ignore[attr-defined]
    assert failed.finish_reason.kind == "error"
    assert list(other.tokens) == es.generate(model, None, IDS, **ASKED)


def test_the_package_of_the_guide(
    model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (ROOT / "docs" / "guide" / "processors.md").read_text(encoding="utf-8")
    (source,) = [one.text for one in blocks(guide, "python") if "class Favour" in one.text]
    (section,) = [one.text for one in blocks(guide, "toml")]
    ((group, named),) = tomllib.loads(section)["project"]["entry-points"].items()
    folder = tmp_path / "guide"
    folder.mkdir()
    distribution(
        folder, "favour", source, {group: {f"{name} s": one for name, one in named.items()}}
    )
    monkeypatch.syspath_prepend(folder)
    favoured = {"name": "favour s", "options": {"ids": [9], "by": 500}}
    assert es.generate(model, None, IDS, logits_processor=[favoured], **ASKED) == [9] * 8


# --- from the command line ------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Caller:
    return Caller(monkeypatch, capsys)


def test_the_command_line_finds_them(call: Caller, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    said = ["generate", "abcabc", "-m", str(folder), "-n", "6", "--json"]
    stages = ["--processor", "favour", "--processor-option", "favour.ids=[9, 11]"]
    stages += ["--hook", "insert", "--hook-option", "insert.ids=[21,22]"]
    outcome = call(*said, *stages)
    assert (outcome.code, outcome.err) == (0, "")
    (found,) = json.loads(outcome.out)["results"]
    model, tokenizer = es.load(folder)
    own = importlib.import_module("everystep_own_stages")
    asked = {"logits_processor": [own.Favour([9, 11])], "hooks": [own.Insert([21, 22])]}
    beside = {"max_new_tokens": 6, "return_dict_in_generate": True}
    assert found["tokens"] == [*es.generate(model, tokenizer, "abcabc", **asked, **beside).tokens]
    assert found["tokens"][1:3] == [21, 22]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["--processor", "favor"], "--processor names a processor that there is not: 'favor'"),
        (["--hook", "insart"], "Perhaps you meant insert"),
        (["--processor-option", "favour.by=3"], "belongs to no processor of the command"),
        (["--hook", "insert", "--hook-option", "ids=[3]"], "wanted insert.OPTION=VALUE"),
        (["--hook", "insert", "--hook-option", "insert.ids"], "--hook-option is spelled wrong"),
    ],
)
def test_a_wrong_one_is_refused_before_the_model_is_loaded(
    call: Caller, said: list[str], words: str
) -> None:
    outcome = call("generate", "Why?", "-m", "/nowhere", *said)
    assert outcome.code == 2 and words in " ".join(outcome.err.split()), outcome.err


def test_completion_knows_them() -> None:
    from everystep.cli.completion import VALUES

    assert [*VALUES["hook"]()] == sorted(GROUPS["everystep.hooks"])
