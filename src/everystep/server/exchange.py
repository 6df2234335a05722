"""One exchange over HTTP: a request whose body comes bounded, and an answer, whole or in a stream.

Wires differ in how they write events and errors; a `WireForm` says that for one of them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everystep.errors import EverystepError, RequestError
from everystep.files.strict_json import require_single_keys
from everystep.server.access import Hosts, Keys, RecordFolder
from everystep.server.asking import Caller
from everystep.server.fields import Json
from everystep.server.request_log import LINE, RequestLine
from everystep.server.routes import RouteTable
from everystep.server.tracing import Tracing

log = logging.getLogger("everystep.server")


class HttpError(EverystepError):
    """A request that is answered with a status of its own."""

    def __init__(
        self,
        status: int,
        text: str,
        *,
        code: str | None = None,
        retry: int | None = None,
        param: str | None = None,
    ):
        super().__init__(text)
        self.status, self.code, self.retry, self.param = status, code, retry, param


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The settings of a front.

    `head_bytes`, `head_seconds`: that the head of a request may have and take. `body_bytes`: of a
    body at most. `body_seconds`: between two pieces of it. `write_seconds`: that a reader may take
    nothing. `ping_seconds`: of silence in a stream before a comment. `hosts`: names beside
    localhost and addresses. `origins`: of pages that may ask. `deadline`: seconds that a request
    may take, None for any number. `vllm_metrics`: whether metrics have vLLM's names too. `tracing`:
    where spans of requests go. `records`: where what `recorded` keys ask for is written down, None
    for nowhere.
    """

    head_bytes: int = 1 << 16
    head_seconds: float = 30.0
    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    ping_seconds: float = 15.0
    keys: Keys = field(default_factory=Keys)
    hosts: Hosts = field(default_factory=Hosts)
    origins: tuple[str, ...] = ()
    deadline: float | None = None
    vllm_metrics: bool = False
    tracing: Tracing | None = None
    records: RecordFolder | None = None
    recorded: Keys = field(default_factory=Keys)


def defect(error: Exception, id: str) -> HttpError:
    """Return what a client is told of an error that nobody expected; the log has all of it."""
    log.error("%s: a defect of the server", id, exc_info=error)
    return HttpError(500, "A defect of the server; its log has more.")


class Gone(Exception):
    """The client is not there any more."""


# --- forms of wires -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WireForm:
    """The form in which a wire writes errors and events.

    `error`: the body of an error, from it and the id of the exchange. `last`: the event of an error
    in the middle of a stream, None where the answer says it itself. `named`: events have names,
    which are their types, and a stream ends without a mark. `ping`: what is sent in silence.
    """

    error: Callable[[HttpError, str], Json]
    last: Callable[[HttpError, str], Json] | None
    named: bool = False
    ping: bytes = b": ping\n"

    def event(self, value: Json) -> bytes:
        """Return the bytes of an event."""
        data = b"data: " + msgspec.json.encode(value) + b"\n\n"
        return b"event: " + value["type"].encode() + b"\n" + data if self.named else data

    @property
    def end(self) -> bytes:
        """The bytes after the last event of a whole answer."""
        return b"" if self.named else b"data: [DONE]\n\n"


_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


def error_body(error: HttpError, _: str = "") -> dict[str, Json]:
    """Return an error as OpenAI's clients read it."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else _ERROR_TYPES.get(error.status, usual)
    told = {"message": str(error)[:2000], "type": kind, "param": error.param, "code": error.code}
    return {"error": told}


TOO_LONG = "context_length_exceeded"
_PROMPTS = ("messages", "input", "prompt")
"""Fields that hold a prompt, which errors about one do not name."""
OPENAI_FORM = WireForm(error_body, error_body)


def named_in(text: str, names: Iterable[str]) -> str | None:
    """Return the field that an error's text names first, with its place inside; None for none."""
    found: re.Match[str] | None = None
    for name in names:
        path = rf"(?<![-\w.]){re.escape(name[:80])}(?![-\w])(?:\[\d+\]|\.[a-z]\w*)*"
        match = re.search(path, text)
        if match is not None and (found is None or match.start() < found.start()):
            found = match
    return None if found is None else found.group()


# --- one exchange ---------------------------------------------------------------------------------


def _parsed(raw: bytes) -> Json:
    """Return the value of JSON in which each object has a key once; ValueError names another."""
    found: Json = msgspec.json.decode(raw)
    require_single_keys(raw)
    return found


class Exchange:
    """One request and its answer."""

    def __init__(
        self,
        settings: FrontSettings,
        form: WireForm,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        self.request = Request(scope)
        self.form = form
        self.id = secrets.token_hex(12)
        self.line: RequestLine = scope.get(LINE) or RequestLine()
        self.line.request_id = self.id
        self.caller = Caller()
        self.status = 0
        self.is_long = False
        self.left = asyncio.Event()
        self.names: tuple[str, ...] = ()
        self._settings, self._receive, self._send = settings, receive, send
        self._listening: asyncio.Task[None] | None = None

    # --- in ---------------------------------------------------------------------------------------

    async def body(self) -> Json:
        """Return the body, read as JSON; from now on the client is listened to."""
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "The body is not application/json.")
        raw = await self._bytes()
        self.listen()
        self.is_long = len(raw) > 1 << 16
        try:
            found = await asyncio.to_thread(_parsed, raw) if self.is_long else _parsed(raw)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            raise RequestError("the body is no JSON", got=str(error)[:200]) from error
        self.names = tuple(found)[:256] if isinstance(found, dict) else ()
        return found

    async def fields(self, route: RouteTable) -> dict[str, Json]:
        """Return the fields of the body, read in a thread where that is long."""
        body = await self.body()
        self.names += tuple(one.name for one in route.fields.values() if one.required)
        return await asyncio.to_thread(route.read, body) if self.is_long else route.read(body)

    def place(self, error: HttpError) -> None:
        """Let an error about the request say which field of it is meant."""
        if error.param is None and error.status in (400, 404):
            error.param = named_in(str(error), self.names)
        if error.param is None and str(error).startswith("the prompt "):
            error.param = next((one for one in _PROMPTS if one in self.names), None)

    async def _bytes(self) -> bytes:
        """Return the bytes of the body, which come soon enough and are not too many."""
        found = bytearray()
        async for piece in self.pieces(self._settings.body_bytes):
            found += piece
        return bytes(found)

    async def pieces(self, most: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the body, which come soon enough and are at most so many."""
        size, declared = 0, self.request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise HttpError(413, f"The body is longer than {most} bytes.")
        while True:
            try:
                async with asyncio.timeout(self._settings.body_seconds):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(408, "The body comes too slowly.", code="slow_body") from None
            if message["type"] == "http.disconnect":
                raise Gone
            piece = message.get("body", b"")
            size += len(piece)
            if size > most:
                raise HttpError(413, f"The body is longer than {most} bytes.")
            yield piece
            if not message.get("more_body"):
                return

    def listen(self) -> None:
        """Listen from now on, when the body was read, whether the client is still there."""
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left.set()

    # --- out --------------------------------------------------------------------------------------

    async def answer(self, value: Json, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        """Send a value as JSON."""
        body = msgspec.json.encode(value)
        await self.send(Response(body, status, headers, "application/json"))

    async def send(self, response: Response) -> None:
        """Send a whole response."""
        self.status = response.status_code
        response.headers["x-request-id"] = response.headers["request-id"] = self.id
        await response(self.request.scope, self._receive, self._send)

    async def stream(self, chunks: AsyncGenerator[Json, None]) -> HttpError | None:
        """Send chunks as server-sent events, and a comment where none comes for a while.

        What goes wrong before the first is an answer of its own; later it is the last event, and
        returned.
        """
        coming = aiter(chunks)
        try:
            waiting = asyncio.ensure_future(anext(coming))
            value = await waiting  # before the status: an error still has one
            await self._start_stream()
            while True:
                await self._write(self.form.event(value))
                waiting = asyncio.ensure_future(anext(coming))
                while not (await asyncio.wait((waiting,), timeout=self._ping))[0]:
                    await self._write(self.form.ping)
                value = await waiting
        except StopAsyncIteration:
            await self._write(self.form.end, more=False)
            return None
        except Exception as caught:
            if not self.status or isinstance(caught, Gone):
                raise
            error = caught if isinstance(caught, HttpError) else defect(caught, self.id)
            self.line.ended_with = error.status
            self.place(error)
            last = self.form.last
            told = b"" if last is None else self.form.event(last(error, self.id))
            await self._write(told, more=False)
            return error
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)  # or its error is called lost
            with suppress(RuntimeError):
                await chunks.aclose()

    @property
    def _ping(self) -> float:
        return self._settings.ping_seconds

    async def _start_stream(self) -> None:
        self.status = 200
        headers = {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
            b"x-request-id": self.id.encode(),
            b"request-id": self.id.encode(),
        }
        start = {"type": "http.response.start", "status": 200, "headers": [*headers.items()]}
        await self._send(start)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        """Send a piece; Gone if the reader takes nothing for too long."""
        try:
            async with asyncio.timeout(self._settings.write_seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            raise Gone from None

    def stop_listening(self) -> None:
        """Wait for the client no longer."""
        if self._listening is not None:
            self._listening.cancel()
