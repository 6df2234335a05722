"""Servers under test: a tiny model behind the application, on loopback or called by hand."""

from __future__ import annotations

import functools
import json
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from everystep.api.model import LanguageModel
from everystep.config import ChatDefaults
from everystep.processors.grammars.trials import GrammarTrials
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.exchange import FrontSettings
from everystep.server.host import EngineLimits, HostedModel
from everystep.server.link import EngineLink, Mooring, QueueLimits, ThreadMooring
from everystep.server.local import listening
from everystep.server.messages import Failed, Over, RowNews
from everystep.server.quotas import QuotaBook
from everystep.server.service import ServedBeside
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
LIMITS = EngineLimits(max_rows=16)
TRIALS = GrammarTrials()
"""Of all servers of the tests, so that its processes start once."""
PATIENCE = 120


@functools.cache
def tiny() -> LanguageModel:
    """A model whose vocabulary is that of the tokenizer; nobody changes it."""
    return tiny_llama(vocab_size=320, max_position_embeddings=4096)


def in_thread(model: LanguageModel | None = None, limits: EngineLimits = LIMITS) -> ThreadMooring:
    """An engine in a thread, that serves the model as "tiny"."""
    own = model or tiny()
    return ThreadMooring(
        lambda: {"tiny": HostedModel(own, TOKENIZER, limits, trials=TRIALS)}, limits
    )


class MortalMooring(ThreadMooring):
    """Engines in a thread that seem to die when they are told to; the next one is not started
    before that is `let`."""

    def __init__(self, *own: Any) -> None:
        super().__init__(*own)
        self.let = threading.Event()
        self.let.set()
        self._connection: socket.socket | None = None

    def start(self) -> socket.socket:
        assert self.let.wait(PATIENCE)
        self._connection = super().start()
        return self._connection

    def die(self) -> None:
        """End the connection, as the end of a process does."""
        self.let.clear()
        assert self._connection is not None
        self._connection.shutdown(socket.SHUT_RDWR)


class Served:
    """A server that listens on loopback. `url`: where; `front`: what it consists of."""

    def __init__(self, front: Front, port: int) -> None:
        self.front, self.port = front, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """The answer to a body."""
        return self.client.post(path, json=body)

    def completion(self, **body: Any) -> Any:
        """The JSON of a completion that succeeds."""
        answer = self.post("/v1/completions", **body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def served(
    mooring: Mooring | None = None,
    settings: FrontSettings | None = None,
    queue: QueueLimits | None = None,
    beside: ServedBeside | None = None,
    book: QuotaBook | None = None,
    chat: ChatDefaults | None = None,
) -> Iterator[Served]:
    """A server for as long as the body runs; nothing of it is left afterwards. `chat`: what
    messages mean, that of the tiny model without."""
    link = EngineLink(mooring or in_thread(), queue, book)
    front = Front(link, {"tiny": FrontModel(TOKENIZER, chat or tiny().chat_defaults)}, settings)
    with listening(front, beside=beside) as port:
        one = Served(front, port)
        with one.client:
            yield one


@contextmanager
def dying(link: EngineLink) -> Iterator[None]:
    """Let the engine seem to die after the first tokens of each prompt."""
    follow = link.follow

    async def failing(ask: Any, *place: Any) -> AsyncGenerator[Any, None]:
        async for message in follow(ask, *place):
            yield message
            if isinstance(message, RowNews):
                yield Failed(ask.id, 503, "the engine died")
                return
            assert not isinstance(message, Over)

    link.follow = failing  # type: ignore[method-assign]
    try:
        yield
    finally:
        link.follow = follow  # type: ignore[method-assign]


def chunks_of(body: str) -> list[Any]:
    """The JSON of a stream's events, which ends as it should."""
    parts = (one.strip() for one in body.split("\n\n"))
    # Comments come between events where a stream is silent.
    lines = (line for part in parts for line in part.split("\n"))
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(one) for one in events[:-1]]


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(one.get("text", one.get("delta", {}).get("content", "")) or "" for one in own)
