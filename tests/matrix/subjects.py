"""What the cells of the matrix are tried on: tiny real models, and how each of them is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.drivers.session import Session
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Request
from tests.executors.models import family_model
from tests.matrix.rows import Row

VOCABULARY, WINDOW = 320, 6
PROMPT = [*[40, 50, 60] * 2, 40, 50]
SEED = 3
COMMON: dict[str, Any] = {
    "max_new_tokens": 8,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
}


@dataclass(frozen=True)
class Subject:
    """A model, by the function that makes it with all its layers or with fewer, and what it is
    asked."""

    make: Callable[[int], LanguageModel]
    ids: tuple[int, ...] = tuple(PROMPT)
    spelled: bool = True
    ends: tuple[int, ...] = (300, 301, 302)

    @property
    def model(self) -> LanguageModel:
        return self.make(2)

    @property
    def assistant(self) -> LanguageModel:
        """A model of the same vocabulary, which often guesses what this one says."""
        return self.make(1)

    @property
    def tokenizer(self) -> Any:
        return tokenizer() if self.spelled else None

    def options(self, row: Row, **more: Any) -> dict[str, Any]:
        """The keywords of a call about this row's strategy."""
        beside = {"assistant_model": self.assistant} if row.assisted else {}
        return {**COMMON, "eos_token_id": list(self.ends), **row.options, **beside, **more}

    def say(self, row: Row, *, prompt: Any = None, **more: Any) -> list[es.Generated]:
        """What many-prompts calls give for one prompt."""
        asked = [list(self.ids) if prompt is None else prompt]
        options = {"seed": [SEED], **self.options(row, **more)}
        (found,) = es.generate(self.model, self.tokenizer, asked, **options)
        return found if isinstance(found, list) else [found]

    def open(self, row: Row, **more: Any) -> es.Run:
        """A run of the same."""
        options = self.options(row, **more)
        return es.open(self.model, self.tokenizer, list(self.ids), seed=[SEED], **options)

    def request(self, row: Row, *, name: str = "0", **more: Any) -> Request:
        """The same, as engines get it."""
        options = self.options(row, **more)
        seed = options.pop("seed", [SEED])
        session = Session(self.model, self.tokenizer, [""], None, seed, options, gives_events=True)
        (made,) = session.prepared(session.read(list(self.ids), 0), 0).requests
        return replace(made, request_id=name)


@cache
def tokenizer() -> Any:
    return tiny_tokenizer(VOCABULARY)


@cache
def _plain(layers: int) -> LanguageModel:
    return tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=layers)


@cache
def _single(layers: int) -> LanguageModel:
    """In float32, which the native executor runs."""
    return tiny_llama(vocab_size=VOCABULARY, num_hidden_layers=layers, dtype=torch.float32)


@cache
def _window(layers: int) -> LanguageModel:
    made = family_model("mistral", sliding_window=WINDOW, num_hidden_layers=layers)
    return LanguageModel(made, executor="torch")


@cache
def _recurrent(layers: int) -> LanguageModel:
    made = family_model("mamba", state_size=4, num_hidden_layers=layers)
    return LanguageModel(made, executor="torch")


PLAIN = Subject(_plain)
SINGLE = Subject(_single)
SHORT = (5, 6, 7, 5, 6, 7, 5, 6)
WINDOWED = Subject(_window, SHORT, spelled=False, ends=(30,))
RECURRENT = Subject(_recurrent, SHORT, spelled=False, ends=(30,))


@cache
def plain(row: Row, subject: Subject = PLAIN) -> tuple[es.Generated, ...]:
    """The run without any feature."""
    return tuple(subject.say(row))
