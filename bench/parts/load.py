"""A generator of load: streams that each ask again when they are answered, and when tokens came.

It reads events of server-sent streams, from a server of OpenAI's wire or from a socket without
HTTP.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_MOST_LINE = 1 << 20


class Closed(ConnectionError):
    """A connection that ended before an answer began, as llama-server ends one after each."""


@dataclass
class Answered:
    """When a request was sent, and when each event with a token came, in seconds; and the text."""

    began: float
    events: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def first(self) -> float:
        """Seconds until the first event."""
        return self.events[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [later - one for one, later in zip(self.events, self.events[1:], strict=False)]


@dataclass(frozen=True)
class OverHttp:
    """Requests to a server on a port, with these fields beside prompt and length."""

    port: int
    model: str
    asks: Mapping[str, Any]

    async def open(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection for a stream."""
        return await asyncio.open_connection("127.0.0.1", self.port, limit=_MOST_LINE)

    def request(self, prompt: str, tokens: int) -> bytes:
        """What is sent."""
        asked = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True}
        body = json.dumps({**asked, **self.asks}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def finish(self, reader: asyncio.StreamReader) -> None:
        """Read what stands after the last event, so that the connection can be used again."""
        while (await reader.readline()).strip() != b"0":
            pass
        await reader.readline()


@dataclass(frozen=True)
class OverSockets:
    """Requests on sockets whose other ends an engine has, one for each stream."""

    sockets: Sequence[socket.socket]

    async def open(self, number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection of a stream."""
        own = self.sockets[number].dup()
        return await asyncio.open_connection(sock=own, limit=_MOST_LINE)

    def request(self, prompt: str, tokens: int) -> bytes:
        """What is sent."""
        return json.dumps({"prompt": prompt, "max_tokens": tokens}).encode() + b"\n"

    async def finish(self, reader: asyncio.StreamReader) -> None:
        """Read what stands after the last event."""
        await reader.readline()


Target = OverHttp | OverSockets


async def _one(target: Target, number: int, prompts: Sequence[str], tokens: int) -> list[Answered]:
    found: list[Answered] = []
    reader, writer = await target.open(number)
    try:
        for prompt in prompts:
            try:
                found.append(await _answered(target, reader, writer, prompt, tokens))
            except Closed:
                writer.close()
                reader, writer = await target.open(number)
                found.append(await _answered(target, reader, writer, prompt, tokens))
        return found
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _answered(
    target: Target,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    prompt: str,
    tokens: int,
) -> Answered:
    answered = Answered(time.perf_counter())
    writer.write(target.request(prompt, tokens))
    while line := await reader.readline():
        if line.startswith(b"data: [DONE]"):
            await target.finish(reader)
            return answered
        if line.strip() == b"0" and answered.events:  # the last chunk, of who says no [DONE]
            await reader.readline()
            return answered
        if line.startswith(b"data: "):
            _note(answered, line)
        elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
            raise ConnectionError(f"{line.decode().strip()}: {await reader.read(2000)!r}")
    if not answered.events:
        raise Closed("the other side has closed the connection")
    raise ConnectionError("the answer ended before its end")


def _note(answered: Answered, line: bytes) -> None:
    """Note an event; those that only end an answer have no text."""
    event = json.loads(line[6:])
    choices = event.get("choices", [event])
    answered.text += "".join(one.get("text") or "" for one in choices)
    if choices and not choices[0].get("finish_reason"):
        answered.events.append(time.perf_counter())


async def _all(target: Target, prompts: Sequence[Sequence[str]], tokens: int) -> list[Answered]:
    own = (_one(target, number, each, tokens) for number, each in enumerate(prompts))
    return [one for each in await asyncio.gather(*own) for one in each]


@dataclass(frozen=True)
class LoadFigures:
    """What was seen of a run: its seconds, the generator's own processor seconds, and answers."""

    seconds: float
    own_seconds: float
    answers: list[Answered]


def load(target: Target, prompts: Sequence[Sequence[str]], tokens: int) -> LoadFigures:
    """Ask with a stream for each list of prompts, all at once, and say what was seen."""
    began, own = time.perf_counter(), time.process_time()
    answers = asyncio.run(_all(target, prompts, tokens))
    return LoadFigures(time.perf_counter() - began, time.process_time() - own, answers)
