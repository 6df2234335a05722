"""An `AsyncEngine` in tests: how it is asked and read, and a web application over it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Engine, audit
from everystep.errors import CapacityError
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}
LONG: dict[str, Any] = {"max_new_tokens": 80, "eos_token_id": None}
Scope, Message = dict[str, Any], dict[str, Any]
Receive, Send = Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]


def runs(main: Coroutine[Any, Any, None]) -> None:
    """The coroutine ends, in a loop of its own, before the patience of the test does."""
    asyncio.run(asyncio.wait_for(main, 120))


def asked(engine: es.AsyncEngine, question: Callable[[Engine], Any]) -> Awaitable[Any]:
    """What the engine answers between two steps, once all that was handed in has come to it."""

    def ask() -> Any:
        driver = engine._session._plain
        deadline = time.monotonic() + 60
        while (driver._line or driver._departing) and time.monotonic() < deadline:
            if not driver._has_room() and not driver._departing:
                break
            time.sleep(0.001)
        with driver.alone() as inner:
            return question(inner)

    return asyncio.ensure_future(asyncio.to_thread(ask))


async def require_nothing_left(engine: es.AsyncEngine) -> None:
    """Once what was asked for before is done, no group or prompt is inside, and no row but those
    that are kept for prompts that begin alike."""
    driver = engine._session._plain
    while driver.busy:
        await asyncio.sleep(0.001)
    await asked(engine, audit)
    assert await asked(engine, lambda inner: inner.scheduler.groups) == []
    kept = await asked(engine, lambda inner: {one.row for one in inner.prefixes.kept})
    assert await asked(engine, lambda inner: inner.ledger.held) == kept
    assert (driver._boxes, list(driver._line)) == ({}, [])


def kept(event: Any) -> tuple[Any, ...]:
    """An event without the number of its prompt."""
    return event.index, event.token, event.text, event.logprob, event.position, event.finish


async def read(stream: es.AsyncStream) -> list[tuple[Any, ...]]:
    return [kept(event) async for event in stream]


def alone(model: LanguageModel, prompt: Any, **options: Any) -> list[tuple[Any, ...]]:
    return [kept(event) for event in es.stream(model, TOKENIZER, prompt, **options)]


# --- from a web handler ---------------------------------------------------------------------------


class Gone(OSError):
    """The client has closed the connection."""


def web_app(engine: es.AsyncEngine) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An ASGI application that streams the answer to the text it is sent."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        prompt = (await receive())["body"].decode()
        try:
            stream = engine.stream(prompt, **LONG)
        except CapacityError:
            await send({"type": "http.response.start", "status": 503, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        async with stream:
            async for event in stream:
                body = event.text.encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


async def post(app: Any, text: str, pieces: int | None = None) -> tuple[int, str]:
    """Status and body that a client gets, which closes the connection after so many pieces."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": text.encode(), "more_body": False}

    async def send(message: Message) -> None:
        if pieces is not None and len(sent) > pieces:
            raise Gone
        sent.append(message)
        await asyncio.sleep(0)

    try:
        await app({"type": "http", "method": "POST", "path": "/"}, receive, send)
    except Gone:
        return sent[0]["status"], ""
    return sent[0]["status"], b"".join(one["body"] for one in sent[1:]).decode()
