"""A reader who takes nothing has little held for him, and gets the same text later."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from everystep.server import host
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.exchange import FrontSettings
from everystep.server.link import EngineLink
from everystep.server.messages import WINDOW
from everystep.server.service import Service
from tests.server.serving import TOKENIZER, in_thread, tiny

LONG: dict[str, Any] = {"prompt": "hello the", "max_tokens": 900, "ignore_eos": True}
PAUSES = 30
"""Looks after one another in which nothing comes any more."""


class Reader:
    """A client of the application that takes only so many pieces until it is let go."""

    def __init__(self, front: Front, path: str, body: Any, takes: int) -> None:
        self._front, self._path, self._body, self._takes = front, path, body, takes
        self.goes, self.told, self.status, self._pieces = asyncio.Event(), bytearray(), 0, 0

    async def ask(self) -> Any:
        """The events of the answer, or its JSON."""
        raw = json.dumps(self._body).encode()
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
        scope |= {"scheme": "http", "method": "POST", "path": self._path, "query_string": b""}
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope |= {"raw_path": self._path.encode(), "root_path": "", "headers": headers}
        await self._front.application({**scope, "client": None}, self._receiver(raw), self._send)
        if not self._body.get("stream"):
            return json.loads(bytes(self.told))
        lines = self.told.decode().split("\n")
        events = [one.removeprefix("data: ") for one in lines if one.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(one) for one in events]

    def _receiver(self, raw: bytes) -> Any:
        messages = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.Event().wait()

        return receive

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.told += message.get("body", b"")
        self._pieces += 1
        if self._pieces > self._takes:
            await self.goes.wait()


async def until_nothing_comes(link: EngineLink, number: int) -> int:
    """How many events of the ask of this number were sent, when no more come."""
    known, still = -1, 0
    while still < PAUSES:
        await asyncio.sleep(0.02)
        one = link._asking[number]
        now = one.made
        still = still + 1 if now == known and now else 0
        known = now
    return known


async def world(path: str, body: Any) -> None:
    """Ask once reading and once not, and compare."""
    link = EngineLink(in_thread())
    known = {"tiny": FrontModel(TOKENIZER, tiny().chat_defaults)}
    front = Front(link, known, FrontSettings(write_seconds=300.0))
    service = Service(front)
    await service.start()
    try:
        paths = [path, path]
        if "{id}" in path:
            for place in range(2):
                opened = await Reader(front, "/v1/everystep/runs", LONG, 10**9).ask()
                paths[place] = path.replace("{id}", opened["id"])
        wanted = await Reader(front, paths[0], body, 10**9).ask()
        reader = Reader(front, paths[1], body, 5)
        asking = asyncio.create_task(reader.ask())
        while not link._asking:
            await asyncio.sleep(0.01)
        (number,) = link._asking
        told = await until_nothing_comes(link, number)
        assert 5 < told <= WINDOW + WINDOW // 4, told
        assert link._asking[number].news.qsize() <= WINDOW
        assert not asking.done()
        reader.goes.set()
        found = await asking
        assert len(found) > 2 * WINDOW
        assert _said(found) == _said(wanted)
        assert not link._asking
    finally:
        await service.close()


def _said(events: list[Any]) -> list[Any]:
    """What events say, without the names that differ."""
    return [one.get("choices", one.get("tokens")) for one in events]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**LONG, "stream": True, "seed": 5, "temperature": 1}),
        ("/v1/everystep/runs/{id}/step", {"steps": 700, "stream": True}),
    ],
)
def test_a_reader_who_takes_nothing_has_little_held_for_him(path: str, body: Any) -> None:
    asyncio.run(asyncio.wait_for(world(path, body), 120))


def test_a_stream_of_many_sequences_holds_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {**LONG, "stream": True, "seed": 5, "temperature": 1, "n": 4, "max_tokens": 400}
    assert host.WINDOW == WINDOW
    asyncio.run(asyncio.wait_for(world("/v1/completions", body), 120))
