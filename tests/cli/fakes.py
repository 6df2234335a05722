"""A model that answers without a network of any kind: what the commands need, and no more.

The answer to every prompt repeats its last message word by word. What the commands asked for is
recorded in a `Stage`. Nothing here imports torch, so that programs with a fake model start at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import everystep as es
from everystep.config.chat_defaults import ChatDefaults


class FakeFinish(NamedTuple):
    """Has the fields of `FinishReason`."""

    kind: str
    matched: Any = None


class FakeEvent(NamedTuple):
    """Has the fields of `Event`."""

    request_id: str
    index: int
    token: int
    text: str | None
    logprob: float | None
    position: int
    finish: FakeFinish | None
    top_logprobs: None = None


@dataclass
class Stage:
    """The fake world of one test: how it behaves, and what was asked of it."""

    chat_template: str | None = "a template"
    do_sample: bool | None = None
    context: int | None = None
    delay: float = 0.0
    answer: str | None = None
    chat_defaults: ChatDefaults = field(default_factory=partial(ChatDefaults, sampling={}))
    load_failure: BaseException | None = None
    stream_failure: BaseException | None = None
    fetches: tuple[tuple[int, int, str], ...] = ()
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    streams: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    closed: int = 0

    def load(self, path: str, *, progress: Any, **options: Any) -> tuple[Any, Any]:
        """Stands for `es.load`."""
        self.loads.append((path, options))
        for fetch in self.fetches:
            progress(*fetch)
        if self.load_failure is not None:
            raise self.load_failure
        settings = es.GenerationConfig(do_sample=self.do_sample)
        model = FakeModel(self.context, settings, self.chat_defaults)
        return model, FakeTokenizer(self.chat_template)

    def stream(self, model: Any, tokenizer: Any, prompt: Any, **options: Any) -> FakeStream:
        """Stands for `es.stream`."""
        copied = prompt if isinstance(prompt, str) else [dict(one) for one in prompt]
        self.streams.append((copied, options))
        if self.stream_failure is not None:
            raise self.stream_failure
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return FakeStream(self, self.answer or text, options)


@dataclass(frozen=True)
class FakeModel:
    """A model that has a reach, and tells of itself what is shown."""

    weight_bytes: ClassVar = {"q4_1": 80, "q8_0": 20}
    runs_on: ClassVar = "native (avx2)"
    cache_dtype: ClassVar = "float32"

    reach: int | None
    generation_config: es.GenerationConfig
    chat_defaults: ChatDefaults


@dataclass(frozen=True)
class FakeTokenizer:
    """A tokenizer whose tokens are words."""

    chat_template: str | None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """One id per word."""
        return {"input_ids": [100 + place for place, _ in enumerate(text.split())]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        """One id per word of all messages."""
        return [0 for one in messages for _ in one["content"].split()]


@dataclass(frozen=True)
class FakeGenerated:
    """Has the fields of `Generated`."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FakeFinish
    score: float
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: None = None
    prompt_logprobs: None = None
    message: None = None
    hidden_states: None = None
    attentions: None = None
    timings: Mapping[str, float] | None = None
    again: None = None


class FakeStream:
    """Events of one prompt: a word each, for every sequence that was asked for."""

    def __init__(self, stage: Stage, text: str, options: dict[str, Any]) -> None:
        self._stage = stage
        self._pieces = text.replace(" ", "\0 ").split("\0")[: options["max_new_tokens"]]
        self._sequences = options.get("num_return_sequences", 1)
        self._events = self._all_events()

    def _all_events(self) -> Iterator[FakeEvent]:
        for position, piece in enumerate(self._pieces):
            time.sleep(self._stage.delay)
            last = position == len(self._pieces) - 1
            finish = FakeFinish("stop", 2) if last else None
            for index in range(self._sequences):
                yield FakeEvent("0", index, 100 + position, piece, None, position, finish)

    def __iter__(self) -> FakeStream:
        return self

    def __next__(self) -> FakeEvent:
        return next(self._events)

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stage.closed += 1

    def results(self) -> list[list[FakeGenerated]]:
        """Every sequence as it ended."""
        tokens = tuple(range(100, 100 + len(self._pieces)))
        text = "".join(self._pieces)
        reason, seconds = FakeFinish("stop", 2), ("prompt", "decode", "total")
        took = {f"{name}_seconds": 0.25 + i for i, name in enumerate(seconds)}
        told = {"cached_tokens": 3, "timings": {**took, "tokens_per_second": 40.0}}
        scores = [-1.5 - i for i in range(self._sequences)]
        return [[FakeGenerated(text, tokens, reason, one, 7, **told) for one in scores]]


def play(stage: Stage) -> None:
    """From now on the package's face leads to the stage; for programs, not for tests."""
    es.load, es.stream = stage.load, stage.stream  # type: ignore[assignment]
