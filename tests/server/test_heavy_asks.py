"""What takes long to read keeps nobody waiting: a neighbour's stream goes on meanwhile, step after
step."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from everystep.errors import TokenizerError
from everystep.processors.grammars.trials import GrammarTrials, TrialBounds
from everystep.processors.grammars.vocabulary import SpelledTokens, library, vocabulary_of
from everystep.server.host import HostedModel
from everystep.server.link import ThreadMooring
from everystep.testing.models import tiny_llama
from tests.processors.test_grammar_trials import ENDLESS
from tests.server.serving import LIMITS, TOKENIZER, TRIALS, Served, served, tiny
from tests.server.test_strangers import idle

SOME = 5
"""Steps that a neighbour takes at least while something heavy is read."""
_RANDOM = random.Random(5)
HEAVY: dict[str, tuple[Any, int]] = {
    "endless": ({"grammar": ENDLESS}, 400),
    "counted": ({"regex": "a{200000}"}, 200),
    "enum": ({"schema": {"enum": [f"{_RANDOM.getrandbits(64):x}" for _ in range(9_000)]}}, 200),
    "properties": (
        {
            "schema": {
                "type": "object",
                "properties": {
                    f"name {i}": {"type": "string", "pattern": f"^{i}.*[a-z]$", "title": "x" * 120}
                    for i in range(900)
                },
                "required": [f"name {i}" for i in range(900)],
            }
        },
        200,
    ),
    "deep": ({"schema": '{"items":' * 20_000 + "{}" + "}" * 20_000}, 400),
}
OFTEN = {"deep": 16}
"""How often an ask is sent that is soon refused; the others once."""


class Neighbour:
    """A stream that is read, again and again. `steps`: its tokens until now."""

    def __init__(self, server: Served, tokens: int) -> None:
        self._tokens = tokens
        self._server, self.steps, self.began = server, 0, threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.began.wait(60)

    def _read(self) -> None:
        body: Any = {"prompt": "hello the", "ignore_eos": True, "stream": True}
        body["max_tokens"] = self._tokens
        client = self._server.client
        while not self._stop:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    self.steps += line.startswith("data: {")
                    if self.steps > 3:
                        self.began.set()
                    if self._stop:
                        return

    def leave(self) -> None:
        """Read no more."""
        self._stop = True
        self._thread.join()


@contextmanager
def neighbour(server: Served, tokens: int = 4_000) -> Iterator[Neighbour]:
    """A neighbour, whose stream ends with the block; it is of so many tokens each time."""
    one = Neighbour(server, tokens)
    try:
        yield one
    finally:
        one.leave()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    trials = GrammarTrials(TrialBounds(seconds=1.0))

    def hosted() -> dict[str, HostedModel]:
        return {"tiny": HostedModel(tiny(), TOKENIZER, LIMITS, trials=trials)}

    with served(ThreadMooring(hosted, LIMITS)) as one:
        yield one
    trials.close()


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_grammar_stops_no_neighbour(server: Served, name: str) -> None:
    asked, status = HEAVY[name]
    with neighbour(server) as beside:
        before = beside.steps
        for _ in range(OFTEN.get(name, 1)):
            answer = server.post("/v1/completions", prompt="hello", max_tokens=2, **asked)
            assert answer.status_code == status, answer.text
        assert beside.steps - before >= SOME
    assert idle(server)


def test_the_first_grammar_of_a_model_finds_its_vocabulary_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library reads one with the interpreter's lock held, while every stream stands still."""
    model = tiny_llama(vocab_size=347, max_position_embeddings=4096)  # a size of this test alone
    hosted = HostedModel(model, TOKENIZER, LIMITS, trials=TRIALS)
    assert "written" in vars(vocabulary_of(TOKENIZER, 347).spelled)

    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("a vocabulary is read beside streams")

    monkeypatch.setattr(library(), "LLTokenizer", made)
    with served(ThreadMooring(lambda: {"tiny": hosted}, LIMITS)) as server:
        answer = server.post("/v1/completions", prompt="a", max_tokens=2, regex="[ab]+")
        assert answer.status_code == 200, answer.text


def test_a_tokenizer_that_cannot_be_written_is_served_without_grammars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Any) -> str:
        raise TokenizerError("the tokenizer cannot be written")

    monkeypatch.setattr(SpelledTokens, "written", property(fails))
    model = tiny_llama(vocab_size=349, max_position_embeddings=4096)
    HostedModel(model, TOKENIZER, LIMITS, trials=TRIALS).close()


LARGE: dict[str, tuple[dict[str, Any], int]] = {
    "4 MB of text": ({"prompt": "hello the and of it " * 200_000}, 1),
    "100,000 ids": ({"prompt": [5 + number % 300 for number in range(100_000)]}, 8),
    "100,000 ids to score": ({"texts": [[5 + number % 300 for number in range(100_000)]]}, 1),
}
"""What is too long for the model, and how often it is sent."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if one.endswith("score") else ()) for one in LARGE],
)
def test_what_is_too_large_stops_no_neighbour(server: Served, name: str) -> None:
    body, times = LARGE[name]
    path = "/v1/everystep/score" if "texts" in body else "/v1/completions"
    with neighbour(server) as beside:
        before = beside.steps
        for _ in range(times):
            answer = server.post(path, **body)
            assert answer.status_code in ((200, 400) if "texts" in body else (400,)), answer.text
        assert beside.steps - before >= SOME
    assert idle(server)


def test_many_who_ask_for_what_takes_too_long_keep_no_plain_ask_waiting(server: Served) -> None:
    answers: list[Any] = []

    def hostile(number: int) -> None:
        asked = {"grammar": ENDLESS + f"\n// {number}"}
        answers.append(server.post("/v1/completions", prompt="a", max_tokens=2, **asked))

    threads = [threading.Thread(target=hostile, args=(number,)) for number in range(6)]
    for one in threads:
        one.start()
    plain = 0
    while any(one.is_alive() for one in threads):
        server.completion(prompt="hello", max_tokens=2)
        plain += 1
    assert plain > len(threads)
    assert [json.loads(one.text)["error"]["type"] for one in answers] == (
        ["invalid_request_error"] * len(threads)
    )
    assert all("takes too long to compile; wanted at most 1 s" in one.text for one in answers)
