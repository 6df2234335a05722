"""Nothing asked for is dropped: every argument of `model.generate`, given to every way of calling,
is honoured or refused with what to do.

`FACES` is the list of ways; a further one is one more entry.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
import transformers
import typer

import everystep as es
from everystep.api.model import LanguageModel
from everystep.api.subjects import OwnSubject
from everystep.cli.adapters import WITHOUT_ADAPTERS
from everystep.cli.app import app
from everystep.engine import Engine
from everystep.engine.snapshot import fingerprint
from everystep.errors import EverystepError
from everystep.requests.absent import ARGUMENTS, SPEECH_LATER
from everystep.requests.door import KEYWORDS
from everystep.testing.models import tiny_llama
from tests.cli.conftest import call, stage  # noqa: F401  (fixtures)
from tests.cli.fakes import Stage
from tests.cli.running import Caller
from tests.switching.arguments import (
    ASKED,
    BASE,
    IDS,
    IN_PROMPTS,
    OF_TEXTS,
    PROMPT,
    REFUSED,
    WITHOUT_EFFECT,
    Given,
    Recorder,
    resolved,
)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320, hidden_size=16)


# --- ways of calling ------------------------------------------------------------------------------


def rectangle(model: LanguageModel, given: Given) -> Any:
    return model.generate(**({} if "input_ids" in given else {"input_ids": PROMPT}), **given)


def prompt_of(given: Given) -> Given:
    """The prompt as a mapping, with what of the arguments stands in it, which are taken out."""
    return {"input_ids": IDS, **{name: given.pop(name) for name in IN_PROMPTS if name in given}}


def texts(model: LanguageModel, given: Given) -> Any:
    return es.generate(model, given.pop("tokenizer", None), [prompt_of(given)], **given)


def events(model: LanguageModel, given: Given) -> Any:
    prompts = [prompt_of(given)]
    with es.stream(model, given.pop("tokenizer", None), prompts, **given) as stream:
        return [*stream, *stream.results()]


def steps(model: LanguageModel, given: Given) -> Any:
    prompt = prompt_of(given)
    run = es.open(model, given.pop("tokenizer", None), prompt, **given)
    shown = [(one.events, one.beams, one.hidden_states, one.attentions) for one in run]
    return [*shown, run.result()]


FACES: dict[str, Callable[[LanguageModel, Given], Any]] = {
    "model.generate": rectangle,
    "es.generate": texts,
    "es.stream": events,
    "es.open": steps,
}


def seen(model: LanguageModel, face: str, given: Given) -> tuple[Any, list[str]]:
    """What comes back, as plain values, and what the engine was asked for."""
    asked: list[str] = []
    submit, executor = Engine.submit, OwnSubject.executor

    def opened(self: OwnSubject, *needs: Any, **how: Any) -> Any:
        asked.append(repr((needs[1:], how.get("quantization"))))
        return executor(self, *needs, **how)

    def noted(engine: Engine, request: Any) -> Any:
        parts = (request.stops, request.drafter, request.verification, request.pad_token)
        parts += (request.watcher is not None,)
        asked.append(f"{fingerprint(request)} {parts!r}")
        return submit(engine, request)

    torch.manual_seed(0)  # without a seed, calls about prompts take one from here
    Engine.submit = noted  # type: ignore[method-assign]
    OwnSubject.executor = opened  # type: ignore[method-assign]
    try:
        return plain(FACES[face](model, given)), asked
    finally:
        Engine.submit = submit  # type: ignore[method-assign]
        OwnSubject.executor = executor  # type: ignore[method-assign]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in fields(value)}
        left_out = ("timings", "again", "effective_config", "past_key_values")
        return {name: plain(one) for name, one in named.items() if name not in left_out}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


# --- the test -------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.filterwarnings("ignore")
def test_an_argument_is_honoured_or_refused(model: LanguageModel, face: str, name: str) -> None:
    value, beside = resolved(model, name)
    given = {**beside, name: value}
    if name == "inputs_embeds":
        given["input_ids"] = None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if face in REFUSED.get(name, ()):
            taken = {key: one for key, one in given.items() if face not in REFUSED.get(key, ())}
            with pytest.raises(EverystepError) as caught:
                seen(model, face, {**taken, name: value})
            text = str(caught.value)
            assert name in text and text.endswith(".") and ". " in text
            return
        result, asked = seen(model, face, given)
        told = [str(one.message) for one in heard]
        before, asked_before = seen(model, face, {**beside})
    if isinstance(value, Recorder):
        assert value.seen[0] == PROMPT.tolist() and value.seen[-1] == "end"
        return
    why = WITHOUT_EFFECT.get(name) or WITHOUT_EFFECT.get((face, name))
    if why is not None:
        assert result == before
        assert any(name in one for one in told) == why.endswith("a warning says so")
    elif result == before:  # then the engine was asked for something else, and not by chance
        assert asked != asked_before == seen(model, face, {**resolved(model, name)[1]})[1]


@pytest.mark.parametrize("face", OF_TEXTS)
@pytest.mark.parametrize("name", IN_PROMPTS)
def test_what_belongs_to_a_prompt_is_no_keyword(model: LanguageModel, face: str, name: str) -> None:
    calls: dict[str, Callable[..., Any]] = {
        "es.generate": lambda **given: es.generate(model, None, [IDS], **given),
        "es.stream": lambda **given: es.stream(model, None, [IDS], **given),
        "es.open": lambda **given: es.open(model, None, IDS, **given),
    }
    with pytest.raises(EverystepError, match=f"{name}.*Pass the prompt as .*'{name}'"):
        calls[face](**{name: ASKED[name][0]})
    assert calls[face](**{name: None}, **BASE) is not None


@pytest.mark.parametrize("face", FACES)
def test_an_argument_that_nobody_knows_is_refused(model: LanguageModel, face: str) -> None:
    for name in ("wibble", "num_beans"):
        with pytest.raises(TypeError, match=name):
            FACES[face](model, {name: 1})


def test_the_table_holds_every_argument_of_ours() -> None:
    ours = {row.name for row in KEYWORDS.values() if "rectangle" in row.calls}
    heard = {row.name for row in KEYWORDS.values() if row.owner == "speech"}
    assert {*ASKED} == {*ours, *heard, *ARGUMENTS, "timeout"}


def test_and_every_argument_of_the_reference() -> None:
    config = transformers.GenerationConfig().to_dict()
    named = inspect.signature(transformers.GenerationMixin.generate).parameters
    heard = inspect.signature(transformers.WhisperForConditionalGeneration.generate).parameters
    theirs = {*config, *named, *heard} - {"self", "inputs", "kwargs", "transformers_version"}
    known = {*ASKED, *SPEECH_LATER}
    assert {name for name in theirs - known if not name.startswith("_")} == set()


def test_the_exceptions_are_arguments() -> None:
    names = {one if isinstance(one, str) else one[1] for one in WITHOUT_EFFECT}
    assert {*REFUSED, *names} <= {*ASKED}
    assert {face for faces in REFUSED.values() for face in faces} <= {*FACES}


# --- the command line -----------------------------------------------------------------------------

LINE: dict[str, tuple[list[str], Any]] = {
    "strategy": (["--strategy", "nth_best"], "nth_best"),
    "max_new_tokens": (["--max-new-tokens", "3"], 3),
    "do_sample": (["--do-sample"], True),
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "5"], 5),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.5"], 0.5),
    "seed": (["--seed", "7", "--do-sample"], 7),
    "num_beams": (["--num-beams", "3"], 3),
    "num_return_sequences": (["--num-return-sequences", "2", "--do-sample"], 2),
    "best_of": (["--best-of", "2"], 2),
    "assistant_early_exit": (["--assistant-early-exit", "1"], 1),
    "penalty_alpha": (["--penalty-alpha", "0.6"], 0.6),
    "guidance_scale": (["--guidance-scale", "2"], 2.0),
    "repetition_penalty": (["--repetition-penalty", "1.5"], 1.5),
    "stop_strings": (["--stop", "a", "--stop", "b"], ["a", "b"]),
    "regex": (["--regex", "a+"], "a+"),
    "choices": (["--choices", "a", "--choices", "b"], ["a", "b"]),
}
"""Argument -> how it is asked for on the command line, and what reaches the library."""


# tests/cli/test_grammars.py, test_inspect.py, test_adapters.py
LINE_OF_FILES = ("schema", "grammar", "record", "steer")


@pytest.mark.parametrize("name", [name for name in ASKED if name not in LINE_OF_FILES])
def test_the_command_line_hands_it_on_or_refuses_it(
    name: str,
    stage: Stage,  # noqa: F811
    call: Caller,  # noqa: F811
) -> None:
    line, value = LINE.get(name, ([f"--{name.replace('_', '-')}", "1"], None))
    outcome = call("generate", "hi there", *line)
    if name in LINE:
        ((_, options),) = stage.streams
        assert outcome.code == 0 and options[name] == value
    else:
        assert outcome.code == 2 and stage.loads == []
        told = "--help" in outcome.err or "is the option here" in outcome.err
        assert f"--{name.replace('_', '-')}" in outcome.err and told


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words that each command is called by, and the command; shells call the hidden ones."""
    for name, one in group.commands.items():
        if one.hidden:
            continue
        yield (*path, name), one
        yield from _commands(one, (*path, name)) if hasattr(one, "commands") else ()


def test_every_command_takes_an_adapter_or_says_what_to_do(
    call: Caller,  # noqa: F811
) -> None:
    found = dict(_commands(typer.main.get_command(app)))
    taking = {
        words for words, one in found.items() if any("--adapter" in p.opts for p in one.params)
    }
    assert {words[0] for words in found.keys() - taking} == {*WITHOUT_ADAPTERS}
    assert {words for words in taking if words[0] in WITHOUT_ADAPTERS} == set()
    for words in found.keys() - taking:
        outcome = call(*words, "--adapter", "mine")
        assert outcome.code == 2 and outcome.out == ""
        assert outcome.err.splitlines() == [
            f"everystep: `everystep {' '.join(words)}` takes no adapter.",
            f"everystep: {WITHOUT_ADAPTERS[words[0]]}",
        ]
