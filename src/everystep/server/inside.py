"""Requests from inside of the server: the application answers them without a socket.

So a line of a batch file is read, judged, counted and answered as a request over HTTP is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
from starlette.types import ASGIApp, Message

from everystep.server.asking import Caller
from everystep.server.fields import Json

INSIDE = "everystep.inside"
"""The name in a scope under which the caller of such a request stands; no client can set it."""


@dataclass(frozen=True, slots=True)
class InnerReply:
    """An answer. `retry`: the seconds after which it may be asked again, where it says so."""

    status: int
    id: str
    body: Json
    retry: int | None = None


async def ask_inside(application: ASGIApp, path: str, body: bytes, caller: Caller) -> InnerReply:
    """Return the answer of a route to a body of JSON, asked for by this caller."""
    unsent, never = [body], asyncio.Event()
    status, headers, found = 0, dict[str, str](), bytearray()

    async def receive() -> Message:
        if not unsent:
            await never.wait()  # whoever asks does not go away; a cancelled task ends it
        return {"type": "http.request", "body": unsent.pop(), "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            found.extend(message.get("body", b""))

    said = {b"host": b"localhost", b"content-type": b"application/json"}
    said[b"content-length"] = str(len(body)).encode()
    scope: dict[str, object] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
    scope |= {"scheme": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"root_path": "", "query_string": b"", "headers": [*said.items()]}
    scope |= {"client": None, "server": None, INSIDE: caller}
    await application(scope, receive, send)
    retry = headers.get("retry-after")
    read = msgspec.json.decode(bytes(found)) if found else None
    known = headers.get("x-request-id", "")
    return InnerReply(status, known, read, None if retry is None else int(retry))
