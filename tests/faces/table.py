"""The table of faces: every call, argument, kind of prompt and executor.

A cell asks for one thing in one way. Its tokens are those of `model.generate`, or it is refused
for the reason that stands in `refusals.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.cli.command_options import OPTIONS, keyword_of
from everystep.config.installed import HOOKS, PROCESSORS
from everystep.errors import RequestError
from everystep.requests.door import KEYWORDS
from everystep.testing.models import tiny_llama
from tests.adapters.making import PROJECTIONS, random_lora, write_folder
from tests.cli.running import Caller
from tests.switching.arguments import ASKED, BASE, IDS, TOKENIZER, Given, resolved

Tokens = list[list[int]]

TEXT = "Is i"  # IDS are its ids
EXECUTORS = ("auto", "torch")
PROMPTS = ("ids", "text", "mapping", "embeds", "embeds and ids")
_SHAPES_ONLY = ("return_dict_in_generate", "tokenizer", "streamer", "custom_generate", "timeout")
"""Arguments that say in which form results come, or that a call has in a way of its own."""


def arguments() -> Iterator[str]:
    """The keywords of the table that steer what is chosen, and that calls about prompts know."""
    for name, row in KEYWORDS.items():
        if name in ASKED and row.owner in ("field", "object") and name not in _SHAPES_ONLY:
            yield name


class Cell(NamedTuple):
    """What is asked, how, of what."""

    face: str
    argument: str | None
    prompt: str
    executor: str

    def __str__(self) -> str:
        return ", ".join(map(str, self))


class Prompted(Protocol):
    """What knows its prompt."""

    def content(self) -> Any:
        """The prompt as calls about prompts take it."""


@dataclass(frozen=True)
class Asked:
    """A model, a prompt, and keywords; `call` runs command lines. `own`: what has another
    prompt of this name."""

    model: LanguageModel
    prompt: str
    given: Given
    call: Caller | None = None
    own: Prompted | None = None

    def content(self) -> Any:
        """The prompt as calls about prompts take it."""
        if self.own is not None:
            return self.own.content()
        embeds = self.model.get_input_embeddings()(torch.tensor(IDS))
        return {
            "ids": IDS,
            "text": TEXT,
            "mapping": {"text": TEXT},
            "embeds": {"inputs_embeds": embeds},
            "embeds and ids": {"inputs_embeds": embeds, "input_ids": IDS},
        }[self.prompt]

    def options(self) -> Given:
        """The keywords of a call about prompts, with the tokenizer beside them."""
        return {name: one for name, one in self.given.items() if name != "tokenizer"}


def of(result: Any) -> Tokens:
    """The new tokens of each hypothesis."""
    return [[*one.tokens] for one in (result if isinstance(result, list) else [result])]


def rectangle(asked: Asked) -> Tokens:
    content = asked.content()
    given = content if isinstance(content, dict) else {"input_ids": IDS}
    rows = {name: torch.as_tensor(one)[None] for name, one in given.items() if name != "text"}
    rows = rows or {"input_ids": torch.tensor([IDS])}
    tokenizer = {"tokenizer": TOKENIZER} if "tokenizer" not in asked.given else {}
    said = {**asked.given, **tokenizer, "return_dict_in_generate": True}
    found = asked.model.generate(**{**rows, **said}).new_tokens
    return [[*one] for one in found if one]  # a rectangle has rows that a search did not fill


def texts(asked: Asked) -> Tokens:
    given = {**asked.options(), "return_dict_in_generate": True}
    return of(es.generate(asked.model, TOKENIZER, [asked.content()], **given)[0])


def events(asked: Asked) -> Tokens:
    stream = es.stream(asked.model, TOKENIZER, [asked.content()], **asked.options())
    with stream as opened:
        for event in opened:
            if event.finish is not None and event.finish.kind == "error":
                raise event.finish.matched
        return of(opened.results()[0])


def steps(asked: Asked) -> Tokens:
    return of(es.open(asked.model, TOKENIZER, asked.content(), **asked.options()).result())


def engine(asked: Asked) -> Tokens:
    async def submitted() -> Any:
        async with es.AsyncEngine(asked.model, TOKENIZER) as opened:
            given = {**asked.options(), "return_dict_in_generate": True}
            return await opened.generate(asked.content(), **given)

    return of(asyncio.run(submitted()))


def score_of(asked: Asked, tokens: list[int]) -> es.Score:
    """How likely these tokens are after the prompt."""
    given = {name: one for name, one in asked.given.items() if name in SCORED}
    return es.score(asked.model, TOKENIZER, tokens, after=asked.content(), **given)


def line(asked: Asked) -> Tokens:
    """The command line, for keywords that it has options for."""
    assert asked.call is not None
    names = {keyword_of(name): name for name in OPTIONS}
    typed: list[str] = []
    for name, value in asked.given.items():
        option = f"--{names[name].replace('_', '-')}" if name in names else None
        if option is None or value is None:
            continue
        if name == "force_words_ids":  # which are typed as texts
            value = [TOKENIZER.decode(ids) for ids in value]
        if isinstance(value, bool):
            typed.append(option if value else f"--no-{option[2:]}")
        else:
            each = value if isinstance(value, list) else [value]
            typed += [part for one in each for part in (option, str(one))]
    outcome = asked.call("generate", TEXT, "--json", *typed)
    told = [one for one in outcome.err.splitlines() if one.startswith("everystep: ")]
    if outcome.code and told:  # what a call would raise
        raise RequestError(told[-1])
    assert outcome.code == 0, outcome.err
    return [one["tokens"] for one in json.loads(outcome.out)["results"]]


FACES: dict[str, Callable[[Asked], Tokens]] = {
    "model.generate": rectangle,
    "es.generate": texts,
    "es.stream": events,
    "es.open": steps,
    "AsyncEngine": engine,
    "the command line": line,
}


SCORED = ("adapter_names", "steer")
"""The arguments that change how likely a text is, and that `es.score` takes."""
SCORED_AFTER = ("prefix",)
"""The arguments that say what such a text comes after, where an encoder has read it."""

NAMED_THERE = {PROCESSORS.keyword, HOOKS.keyword}
TYPED = {keyword_of(name) for name, one in OPTIONS.items() if one.kind is None} - NAMED_THERE
"""The keywords that the command line has options for, whose values are typed as they are;
processors and hooks are named there."""


def cells() -> Iterator[Cell]:
    """Every cell that there is; the command line takes texts, and what it has options for."""
    for argument in (None, *arguments()):
        for face in FACES:
            if face == "model.generate":
                continue
            for prompt in PROMPTS:
                for executor in EXECUTORS:
                    known = argument is None or argument in TYPED
                    if face != "the command line" or (prompt == "text" and known):
                        yield Cell(face, argument, prompt, executor)


def model_of(executor: Any) -> LanguageModel:
    """A decoder with an adapter named formal."""
    made = tiny_llama(vocab_size=320, hidden_size=16, dtype=torch.float32)
    model = LanguageModel(made.core, made.generation_config, executor=executor)
    with TemporaryDirectory() as folder:
        lora = random_lora(model.state_dict(), 4, PROJECTIONS[:2])
        floats = {name: values.float() for name, values in lora.items()}
        model.load_adapter(write_folder(Path(folder) / "formal", floats), "formal")
    return model


def given_for(cell: Cell, model: LanguageModel, plain: list[int] | None = None) -> Given:
    """The keywords of a cell; a seed is that of the row, but on the command line of the call.
    `plain`: what a plain run says, unless that is said of ids."""
    given = dict(BASE)
    if cell.argument is not None:
        value, beside = resolved(model, cell.argument, plain)
        given = {**beside, cell.argument: value}
    seed = given.get("seed")
    if isinstance(seed, int) and cell.face != "the command line":
        given["seed"] = [seed]
    return given
