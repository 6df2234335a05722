"""`AsyncEngine` on the hash model: storms of clients, and prompts that take long to read.

Every storm has 200 clients, who leave before, at and after the beginning of their prompts. Every
other one gets its answer, those who may wait are counted exactly, and nothing is held at the end.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.api.subjects import OwnSubject
from everystep.drivers.engine_thread import Desk
from everystep.drivers.session import Session
from everystep.engine import Engine
from everystep.errors import CapacityError, EverystepError
from everystep.executors.base import Executor
from everystep.testing import HashExecutor
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Request
from tests.api.asking import require_nothing_left, runs
from tests.images.making import write_folder

VOCABULARY = 320
TOKENIZER = tiny_tokenizer(VOCABULARY)
CLIENTS = 200
PLAIN: dict[str, Any] = {"eos_token_id": None, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    """A model whose requests run on the hash function, one executor each."""
    patch = pytest.MonkeyPatch()

    def executor(subject: OwnSubject, *_: Any, **__: Any) -> Executor:
        return HashExecutor(subject.vocab_size)

    patch.setattr(OwnSubject, "executor", executor)
    yield tiny_llama(dtype=torch.float64, vocab_size=VOCABULARY)
    patch.undo()


@pytest.fixture(scope="module")
def expected(model: LanguageModel) -> dict[tuple[int, int], tuple[int, ...]]:
    """What each prompt and length gives alone."""
    found = {}
    for prompt in range(6):
        (one,) = es.generate(model, None, [ids(prompt)], max_new_tokens=3, seed=0, **PLAIN)
        found |= {(prompt, n): one.tokens[:n] for n in (1, 2, 3)}
    return found


@pytest.fixture(scope="module")
def read_before(model: LanguageModel) -> Callable[[es.AsyncEngine], None]:
    """Has an engine take requests that were read once, so that a storm is quick."""
    known: dict[tuple[Any, ...], Any] = {}

    def prepared(engine: es.AsyncEngine) -> None:
        session: Any = engine._session
        asked, own = session.asked, session.own_request

        def asked_once(prompt: list[int], given: dict[str, Any], since: float) -> Any:
            key = tuple(given.items())
            if key not in known:
                known[key] = asked(prompt, given, since)
            return known[key]

        def read_once(prompt: list[int], index: int, options: Any) -> Request:
            key = (*prompt, id(options))
            if key not in known:
                known[key] = own(prompt, index, options)
            return replace(known[key], request_id=str(index))

        session.asked, session.own_request = asked_once, read_once

    return prepared


def ids(prompt: int) -> list[int]:
    return [5 + prompt, 9, 30 + prompt]


async def _storm(model: LanguageModel, expected: Any, read_before: Any, seed: int) -> None:
    chance = random.Random(seed)
    rows = chance.choice([1, 3, 8])
    limits = {"max_rows": rows, "max_events": chance.choice([1, 2, 256]), "max_waiting": CLIENTS}
    kinds = [chance.choice(["whole", "whole", "stream", "drop", "leave", "cancel", "close"])
             for _ in range(CLIENTS)]  # fmt: skip
    answered = 0

    async def client(engine: es.AsyncEngine, kind: str) -> None:
        nonlocal answered
        prompt, length = chance.randrange(6), chance.randint(1, 3)
        options = {"max_new_tokens": length, "seed": 0, **PLAIN}
        for _ in range(chance.randint(0, 30)):
            await asyncio.sleep(0)
        if kind == "whole":
            found = await engine.generate(ids(prompt), **options)
            assert found.tokens == expected[prompt, length]
            answered += 1
        elif kind == "cancel":
            task = asyncio.ensure_future(engine.generate(ids(prompt), **options))
            for _ in range(chance.randint(0, 6)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            stream = engine.stream(ids(prompt), **options)
            for _ in range(chance.randint(0, 6)):
                await asyncio.sleep(0)
            if kind == "drop":
                del stream
            elif kind == "close":
                await stream.aclose()
            elif kind == "leave":
                async for _ in stream:
                    break
            else:
                assert tuple([e.token async for e in stream]) == expected[prompt, length]
                answered += 1

    async with es.AsyncEngine(model, **limits) as engine:
        read_before(engine)
        await asyncio.gather(*(client(engine, kind) for kind in kinds))
        assert answered == sum(kind in ("whole", "stream") for kind in kinds)
        # Nobody waits any more, so as many may wait as at first.
        await require_nothing_left(engine)
        desk: Any = engine._desk
        assert [one for one in desk._waiting if one.waits] == []


@pytest.mark.few(2)
@pytest.mark.parametrize("block", range(10))
def test_every_other_client_gets_its_answer(
    model: LanguageModel, expected: Any, read_before: Any, block: int
) -> None:
    for seed in range(20 * block, 20 * (block + 1)):
        runs(_storm(model, expected, read_before, seed))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(49))
def test_every_other_client_gets_its_answer_in_ten_thousand_storms(
    model: LanguageModel, expected: Any, read_before: Any, block: int
) -> None:
    for seed in range(200 * (block + 1), 200 * (block + 2)):
        runs(_storm(model, expected, read_before, seed))


def test_a_client_that_left_the_line_makes_nobody_wait(model: LanguageModel) -> None:
    """One streams, a second comes and is dropped at once, a third gets its answer."""

    async def main() -> None:
        async with es.AsyncEngine(model, max_rows=1, max_waiting=2) as engine:
            for _ in range(5):
                first = engine.stream(ids(0), max_new_tokens=40, eos_token_id=None, seed=0)
                await anext(first)
                engine.stream(ids(1), max_new_tokens=2, eos_token_id=None)
                third = asyncio.ensure_future(engine.generate(ids(2), max_new_tokens=2))
                assert len([event async for event in first]) == 39
                assert await third

    runs(main())


def test_how_many_wait_is_exact(model: LanguageModel) -> None:
    async def main() -> None:
        go, begun = threading.Event(), threading.Event()

        def gate(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.set()
            go.wait(60)
            return scores

        async with es.AsyncEngine(model, max_rows=1, max_waiting=3) as engine:
            first = engine.stream(ids(0), max_new_tokens=1, logits_processor=[gate])
            await asyncio.to_thread(begun.wait, 60)
            chance, line = random.Random(3), list[Any]()
            for _ in range(300):
                if line and chance.random() < 0.5:
                    del line[chance.randrange(len(line))]
                elif len(line) < 3:
                    line.append(engine.stream(ids(1), max_new_tokens=1))
                if len(line) == 3:
                    with pytest.raises(CapacityError, match="at most 3; got 3 and this one"):
                        engine.stream(ids(1))
            go.set()
            for stream in (first, *line):
                assert len([event async for event in stream]) == 1

    runs(main())


# --- a request's trouble in time ------------------------------------------------------------------

LONG_TEXT = "hello world " * 33_333
ENDLESS_TEXT = "hello world " * 333_332
LONG_IDS = list(np.arange(100_000) % 300)
SCHEMA = {
    "type": "object",
    "properties": {
        f"name {i}": {"type": "string", "enum": [f"{i} {j}" for j in range(8)]} for i in range(1500)
    },
}
PICTURE = np.random.default_rng(0).integers(0, 255, (5000, 6000, 3), dtype=np.uint8)
ENDLESS = "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}"
BROUGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "a text of 400 kB": (LONG_TEXT, {}),
    "a text of 4 MB": (ENDLESS_TEXT, {}),
    "100,000 ids": (LONG_IDS, {}),
    "a schema of 200 kB": ("a", {"schema": SCHEMA}),
    "a template that takes its whole allowance": ([{"role": "user", "content": "a"}], {}),
    "a picture of 30 megapixels": (
        [{"role": "user", "content": [{"type": "image", "image": PICTURE}]}],
        {},
    ),
}


@pytest.fixture(scope="module")
def sees(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model that reads pictures, on the hash function too, and its tokenizer."""
    return es.load(write_folder(tmp_path_factory.mktemp("sees")))


@pytest.fixture(scope="module")
def reads(model: LanguageModel) -> tuple[Any, Any]:
    """A model and a tokenizer whose chat template never ends."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    tokenizer.chat_template = ENDLESS
    return model, tokenizer


@pytest.mark.parametrize(
    "what",
    [pytest.param(one, marks=pytest.mark.slow) if "4 MB" in one else one for one in BROUGHT],
)
def test_streams_take_their_steps_while_a_prompt_is_brought(
    what: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not brought before the streams of others have taken five steps meanwhile. Were it read
    by the thread that steps, or were that held up until it is read, these would never come."""
    prompt, options = BROUGHT[what]
    model, tokenizer = request.getfixturevalue("sees" if "picture" in what else "reads")
    reading, taken, enough = threading.Event(), [0], threading.Event()
    read, request_of, step = Desk._read, Session.own_request, Engine.step

    def watched(desk: Desk, one: Any, given: Any, options: Any, most: int | None) -> None:
        if given is not prompt:
            return read(desk, one, given, options, most)
        reading.set()

        def read_options() -> Any:
            try:
                return options()
            except EverystepError:
                enough_taken()
                raise

        read(desk, one, given, read_options, most)

    def own_request(session: Session, given: Any, *rest: Any) -> Request:
        try:
            return request_of(session, given, *rest)
        finally:
            if given is prompt:
                enough_taken()

    def enough_taken() -> None:
        assert enough.wait(90)

    def gated(engine: Engine) -> Any:
        if reading.is_set():
            taken[0] += 1
            if taken[0] >= 5:
                enough.set()
        return step(engine)

    monkeypatch.setattr(Desk, "_read", watched)
    monkeypatch.setattr(Session, "own_request", own_request)
    monkeypatch.setattr(Engine, "step", gated)

    async def main() -> None:
        async with es.AsyncEngine(model, tokenizer) as engine:
            going = asyncio.ensure_future(_steps(engine, enough.is_set))
            found = await asyncio.gather(
                engine.generate(prompt, max_new_tokens=2, seed=0, **options), return_exceptions=True
            )
            await going
            assert isinstance(found[0], str | EverystepError), found[0]

    runs(main())
    assert taken[0] >= 5


async def _steps(engine: es.AsyncEngine, enough: Callable[[], bool]) -> None:
    """Streams one after another, until it is enough."""
    while not enough():
        async for _ in engine.stream(ids(0), max_new_tokens=100, eos_token_id=None, seed=0):
            pass


# --- deadlines ------------------------------------------------------------------------------------


def test_a_deadline_counts_waiting_in_line_and_being_set_aside(model: LanguageModel) -> None:
    """One holds the only row; one waits in line, one is set aside: both end at their moment."""

    async def main() -> None:
        async with es.AsyncEngine(model, max_rows=1, max_events=2) as engine:
            slow = engine.stream(ids(0), max_new_tokens=60, eos_token_id=None, timeout=0.3)
            await anext(slow)
            go, begun = threading.Event(), threading.Event()

            def gate(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                begun.set()
                go.wait(60)
                return scores

            asked: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None}
            holds = engine.stream(ids(1), logits_processor=[gate], **asked)
            await asyncio.to_thread(begun.wait, 60)
            waits = engine.stream(ids(2), timeout=0.05, **asked)
            await asyncio.sleep(0.4)
            go.set()
            (last,) = [event async for event in waits]
            assert (last.token, last.finish) == (-1, es.FinishReason("time"))
            assert len([event async for event in holds]) == 2
            *_, last = [event async for event in slow]
            assert last.finish == es.FinishReason("time")

    runs(main())
