"""Servers under test: a tiny model behind the application, on loopback or called by hand."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from everystep.api.model import LanguageModel
from everystep.server.application import Front, FrontSettings
from everystep.server.asking import FrontModel
from everystep.server.host import EngineLimits, HostedModel
from everystep.server.link import EngineLink, Mooring, QueueLimits, ThreadMooring
from everystep.server.serving import Listener
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
LIMITS = EngineLimits(max_rows=16)
PATIENCE = 120


@functools.cache
def tiny() -> LanguageModel:
    """A model whose vocabulary is that of the tokenizer; nobody changes it."""
    return tiny_llama(vocab_size=320, max_position_embeddings=4096)


def in_thread(model: LanguageModel | None = None) -> ThreadMooring:
    """An engine in a thread, that serves the model as "tiny"."""
    own = model or tiny()
    return ThreadMooring(lambda: {"tiny": HostedModel(own, TOKENIZER, LIMITS)}, LIMITS)


class Loop:
    """An event loop in a thread of its own, for clients that block."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns, run there."""
        return asyncio.run_coroutine_threadsafe(main, self.loop).result(PATIENCE)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Served:
    """A server that listens on loopback. `url`: where; `front`, `loop`: what it consists of."""

    def __init__(self, front: Front, loop: Loop, listener: uvicorn.Server) -> None:
        self.front, self.loop, self._listener = front, loop, listener
        self.port = listener.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
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
) -> Iterator[Served]:
    """A server for as long as the body runs; nothing of it is left afterwards."""
    loop = Loop()
    link = EngineLink(mooring or in_thread(), queue)
    front = Front(link, {"tiny": FrontModel(TOKENIZER, tiny().chat_defaults)}, settings)
    loop.run(link.start())
    config = uvicorn.Config(
        front.application, "127.0.0.1", 0, log_config=None, lifespan="off", server_header=False
    )
    listener = Listener(config)

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(listener.serve())
        while not listener.started:
            await asyncio.sleep(0.005)
        return task

    async def stop(task: asyncio.Task[None]) -> None:
        listener.should_exit = True
        await task
        await link.close()

    task = loop.run(start())
    one = Served(front, loop, listener)
    try:
        yield one
    finally:
        one.client.close()
        loop.run(stop(task))
        loop.close()


def chunks_of(body: str) -> list[Any]:
    """The JSON of a stream's events, which ends as it should."""
    events = [line.strip().removeprefix("data: ") for line in body.split("\n\n") if line]
    assert events[-1] == "[DONE]", events[-1]
    return [json.loads(one) for one in events[:-1]]


def joined(chunks: list[Any], index: int = 0) -> str:
    """The text of one choice of a stream."""
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(one.get("text", one.get("delta", {}).get("content", "")) or "" for one in own)
