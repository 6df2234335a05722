"""The application: routes, answers and errors of HTTP.

One responder serves every route: while it works it listens whether the client is still there, and
what is under way ends when it has gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from everystep._version import __version__
from everystep.errors import CapacityError, EverystepError, OversizeError, RequestError
from everystep.server.access import Hosts, Keys, key_of
from everystep.server.answering import Head, StreamedAnswer, WholeAnswer, finite
from everystep.server.asking import (
    CALLER,
    Addressee,
    Caller,
    FrontModel,
    UnknownModelError,
    Wanted,
    addressee,
    calling,
    read_chat,
    read_completion,
    read_score,
    render,
)
from everystep.server.documents import openapi
from everystep.server.fields import Json
from everystep.server.inside import INSIDE
from everystep.server.line import LinePlace
from everystep.server.link import EngineGone, EngineLink, News
from everystep.server.messages import Begun, Failed, Likelihoods, Over, RowNews, ScoredTexts
from everystep.server.metrics import ServerMetrics
from everystep.server.quotas import QuotaError
from everystep.server.routes import CHAT, COMPLETIONS, DETOKENIZE, SCORE, TOKENIZE, RouteTable

log = logging.getLogger("everystep.server")

_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_OPEN = ("/health", "/ready")
"""Routes that need no key."""


class HttpError(EverystepError):
    """A request that is answered with a status of its own."""

    def __init__(
        self, status: int, text: str, *, code: str | None = None, retry: int | None = None
    ):
        super().__init__(text)
        self.status, self.code, self.retry = status, code, retry


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """The settings of a front.

    `body_bytes`: of a body at most. `body_seconds`: between two pieces of it. `write_seconds`: that
    a reader may take nothing. `ping_seconds`: of silence in a stream before a comment. `hosts`:
    names beside localhost and addresses. `origins`: of pages that may ask. `deadline`: seconds that
    a request may take, None for any number.
    """

    body_bytes: int = 32 << 20
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    ping_seconds: float = 15.0
    keys: Keys = field(default_factory=Keys)
    hosts: Hosts = field(default_factory=Hosts)
    origins: tuple[str, ...] = ()
    deadline: float | None = None


class Front:
    """The application, over an engine."""

    def __init__(
        self,
        link: EngineLink,
        models: Mapping[str, FrontModel],
        settings: FrontSettings | None = None,
    ) -> None:
        self.link, self.models = link, models
        self.settings = settings or FrontSettings()
        self.metrics = ServerMetrics()
        self.draining = False
        self.open = 0
        self._created = int(time.time())
        self.application = Starlette(routes=self._routes())

    def _routes(self) -> list[Route]:
        def post(path: str, answer: Callable[[Exchange], Awaitable[None]]) -> Route:
            return Route(path, Responder(self, answer), methods=["POST"])

        def get(path: str, answer: Callable[[Exchange], Awaitable[None]]) -> Route:
            return Route(path, Responder(self, answer), methods=["GET"])

        return [
            post(COMPLETIONS.path, self._completions),
            post(CHAT.path, self._chat),
            post(TOKENIZE.path, self._tokenize),
            post(DETOKENIZE.path, self._detokenize),
            post(SCORE.path, self._score),
            get("/v1/models", self._list_models),
            get("/v1/models/{name:path}", self._show_model),
            get("/health", self._health),
            get("/ready", self._readiness),
            get("/metrics", self._metrics),
            get("/openapi.json", self._openapi),
            get("/version", self._told_version),
            Route("/{rest:path}", Responder(self, _nowhere), methods=[*_METHODS]),
        ]

    def add(self, routes: Iterable[Route]) -> None:
        """Serve further routes."""
        self.application.router.routes[-1:-1] = routes  # the last one is for what has no route

    # --- generating -------------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        await self._generate(exchange, COMPLETIONS, read_completion)

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, CHAT, read_chat)

    async def _generate(
        self,
        exchange: Exchange,
        route: RouteTable,
        read: Callable[[Mapping[str, Json], Addressee, Caller], Wanted],
    ) -> None:
        given, to = await self._read(exchange, route)
        if self.settings.deadline is not None:
            given["timeout"] = min(given.get("timeout", 1e9), self.settings.deadline)
        # In a thread: templates and long texts take their time, which is nobody else's.
        wanted = await asyncio.to_thread(read, given, to, exchange.caller)
        self._require_room(sum(len(ids) for ids, _ in wanted.prompts), len(wanted.prompts))
        kind = "chatcmpl" if wanted.in_chat else "cmpl"
        head = Head(f"{kind}-{exchange.id}", to.name)
        if wanted.stream:
            await exchange.stream(self._chunks(wanted, head))
            return
        answer = WholeAnswer(wanted, head)
        async with aclosing(self._follow(wanted)) as news:
            async for number, message in news:
                if isinstance(message, Begun):
                    answer.begin(number, message)
                elif isinstance(message, Over):
                    _refuse_late(message)
                    answer.end(number, message)
        self._count(to, answer.usage.prompt, answer.usage.cached, answer.usage.completion)
        await exchange.answer(answer.shown())

    async def _chunks(self, wanted: Wanted, head: Head) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream, the first one once the engine has begun."""
        answer, opened, last = StreamedAnswer(wanted, head), False, time.monotonic()
        async with aclosing(self._follow(wanted)) as news:
            async for number, message in news:
                if not opened:
                    opened = True
                    for chunk in answer.opening():
                        yield chunk
                chunks: Iterable[Json] = ()
                if isinstance(message, Begun):
                    answer.begin(number, message)
                elif isinstance(message, RowNews):
                    chunks = answer.row(number, message)
                    now = time.monotonic()
                    told = (
                        self.metrics.first if answer.usage.completion == 0 else self.metrics.between
                    )
                    told.observe(now - last)
                    last = now
                elif isinstance(message, Over):
                    chunks = answer.end(number, message)
                for chunk in chunks:
                    yield chunk
        for chunk in answer.closing():
            yield chunk
        self._count(wanted.to, answer.usage.prompt, answer.usage.cached, answer.usage.completion)

    async def _follow(self, wanted: Wanted) -> AsyncGenerator[tuple[int, News], None]:
        """Yield what becomes of every prompt, with its number; raise what one of them fails with.

        Leaving the iterator ends them all.
        """
        places = wanted.places(calling())
        for place in places:
            self._require_possible(place)
        asks = wanted.asks([self.link.next_number() for _ in wanted.prompts])
        news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()

        async def pump(number: int) -> None:
            async with aclosing(self.link.follow(asks[number], places[number])) as messages:
                async for message in messages:
                    news.put_nowait((number, message))

        pumps = [asyncio.create_task(pump(number)) for number in range(len(asks))]
        try:
            left = len(asks)
            while left:
                number, message = await news.get()
                if isinstance(message, Failed):
                    raise self._failure(message, wanted)
                if isinstance(message, RowNews) and message.kind in ("error", "cancelled"):
                    continue  # `Failed` says it next
                left -= isinstance(message, Over)
                yield number, message
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _failure(self, message: Failed, wanted: Wanted | None) -> HttpError:
        text = message.text if wanted is None else wanted.respelled(message.text)
        retry = self.link.pause() if message.status in (429, 503) else None
        return HttpError(message.status, text, retry=retry)

    def _require_room(self, positions: int, asks: int) -> None:
        if not self.link.ready:
            raise HttpError(503, "the engine is being started", code="engine_starting", retry=2)
        caller = calling()
        if caller.background:  # how much of that there is, is bounded by who asks
            return
        try:
            self.link.book.require_tokens(caller.key, positions)
            self.link.require_room(positions, asks)
        except OversizeError:
            raise
        except QuotaError as error:
            raise HttpError(429, str(error), code="quota", retry=error.seconds) from error
        except CapacityError as error:
            self.metrics.rejections.inc()
            raise HttpError(429, str(error), code="queue_full", retry=self.link.pause()) from error

    def _require_possible(self, place: LinePlace) -> None:
        """Raise OversizeError for what could wait forever and never begin."""
        self.link.book.require_rows(place.owner, place.rows)
        known = (
            ("rows", place.rows, self.link.rows, "Lower n, best_of or num_beams"),
            ("positions", place.positions + 1, self.link.positions, "Send a shorter prompt"),
        )
        for what, needed, most, do in known:
            if most is not None and needed > most:
                raise OversizeError(
                    f"the request needs more {what} than the engine has",
                    wanted=f"at most {most}",
                    got=needed,
                    do=do,
                )

    def _count(self, to: Addressee, prompt: int, cached: int, completion: int) -> None:
        self.metrics.prompt.labels(to.name).inc(prompt)
        self.metrics.cached.labels(to.name).inc(cached)
        self.metrics.generated.labels(to.name).inc(completion)

    async def _read(
        self, exchange: Exchange, route: RouteTable
    ) -> tuple[dict[str, Json], Addressee]:
        """Return the fields of a body, and who is meant."""
        body = await exchange.body()
        given = await asyncio.to_thread(route.read, body) if exchange.is_long else route.read(body)
        if not self.link.models:
            raise HttpError(503, "the engine is being started", code="engine_starting", retry=2)
        return given, addressee(given.get("model"), self.link.models, self.models)

    # --- beside generating ------------------------------------------------------------------------

    async def _tokenize(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, TOKENIZE)
        text, messages = given.get("prompt"), given.get("messages")
        if (text is None) == (messages is None):
            raise RequestError("one of prompt and messages is wanted", do="Send one of them")
        tokenizer = to.front.tokenizer

        def ids() -> list[int]:
            if messages is not None:
                begins = given.get("add_generation_prompt", True)
                return render(messages, to.front, begins=begins)
            special = given.get("add_special_tokens", True)
            return list(tokenizer.encode(str(text), add_special_tokens=special))

        found = await asyncio.to_thread(ids)
        answer = {"count": len(found), "max_model_len": to.facts.context, "tokens": found}
        if given.get("return_token_strs"):
            answer["token_strs"] = [tokenizer.decode([one]) for one in found]
        await exchange.answer(answer)

    async def _detokenize(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, DETOKENIZE)
        decode = to.front.tokenizer.decode
        text = await asyncio.to_thread(decode, given["tokens"], skip_special_tokens=False)
        await exchange.answer({"prompt": text})

    async def _score(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, SCORE)
        ask = await asyncio.to_thread(read_score, given, to, self.link.next_number())
        self._require_room(sum(map(len, ask.rows)), 1)
        async with aclosing(self.link.follow(ask)) as news:
            async for message in news:
                if isinstance(message, Failed):
                    raise self._failure(message, None)
                if isinstance(message, ScoredTexts):
                    scores = [_shown_score(one) for one in message.rows]
                    await exchange.answer({"object": "list", "model": to.name, "data": scores})

    async def _list_models(self, exchange: Exchange) -> None:
        await exchange.answer({"object": "list", "data": self._models()})

    async def _show_model(self, exchange: Exchange) -> None:
        name = exchange.request.path_params["name"]
        for one in self._models():
            if one["id"] == name:
                await exchange.answer(one)
                return
        raise HttpError(404, f"There is no model {name[:80]!r}.", code="model_not_found")

    def _models(self) -> list[dict[str, Json]]:
        about = {"object": "model", "created": self._created, "owned_by": "everystep"}
        found: list[dict[str, Json]] = []
        for one in self.link.models.values():
            size = {"max_model_len": one.context}
            found.append({"id": one.name, **about, "root": one.name, "parent": None, **size})
            for adapter in one.adapters:
                found.append({"id": adapter, **about, "root": adapter, "parent": one.name, **size})
        return found

    async def _health(self, exchange: Exchange) -> None:
        if not self.link.ready:
            raise HttpError(503, "The engine is not there.", retry=2)
        await exchange.answer({"status": "ok"})

    async def _readiness(self, exchange: Exchange) -> None:
        if self.draining or not self.link.ready:
            raise HttpError(503, "No requests are taken.", retry=5)
        await exchange.answer({"status": "ready"})

    async def _metrics(self, exchange: Exchange) -> None:
        self.metrics.running.set(self.link.running)
        self.metrics.waiting.set(self.link.waiting)
        self.metrics.ready.set(self.link.ready)
        self.metrics.restarts.set(self.link.restarts)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        await exchange.send(Response(self.metrics.shown(), media_type=kind))

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(openapi())

    async def _told_version(self, exchange: Exchange) -> None:
        await exchange.answer({"version": __version__})


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD")


async def _nowhere(exchange: Exchange) -> None:
    raise HttpError(404, f"There is no route {exchange.request.url.path[:80]!r}.")


def _refuse_late(message: Over) -> None:
    """Refuse to call an answer what its deadline ended before its first token."""
    if all(one.kind == "time" and not one.tokens for one in message.results):
        raise HttpError(408, "The deadline passed before the first token.", code="deadline")


def _shown_score(found: Likelihoods) -> dict[str, Json]:
    top = [
        [{"id": id, "logprob": finite(value)} for id, value in zip(ids, values, strict=True)]
        for ids, values in zip(found.top_tokens, found.top_logprobs, strict=True)
    ]
    logprobs = [finite(one) for one in found.logprobs]
    return {"tokens": found.tokens, "logprobs": logprobs, "top_logprobs": top}


# --- one exchange ---------------------------------------------------------------------------------


class Gone(Exception):
    """The client is not there any more."""


class Exchange:
    """One request and its answer."""

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self.request = Request(scope)
        self.id = secrets.token_hex(12)
        self.caller = Caller()
        self.status = 0
        self.is_long = False
        self.left = asyncio.Event()
        self._front, self._receive, self._send = front, receive, send
        self._listening: asyncio.Task[None] | None = None

    # --- in ---------------------------------------------------------------------------------------

    async def body(self) -> Json:
        """Return the body, read as JSON; from now on the client is listened to."""
        kind = self.request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise HttpError(415, "The body is not application/json.")
        raw = await self._bytes()
        self._listening = asyncio.create_task(self._listen())
        self.is_long = len(raw) > 1 << 16
        try:
            if self.is_long:
                return await asyncio.to_thread(msgspec.json.decode, raw)
            return msgspec.json.decode(raw)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise RequestError("the body is no JSON", got=str(error)[:200]) from error

    async def _bytes(self) -> bytes:
        """Return the bytes of the body, which come soon enough and are not too many."""
        found = bytearray()
        async for piece in self.pieces(self._front.settings.body_bytes):
            found += piece
        return bytes(found)

    async def pieces(self, most: int) -> AsyncGenerator[bytes, None]:
        """Yield the bytes of the body, which come soon enough and are at most so many."""
        settings, size = self._front.settings, 0
        declared = self.request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > most:
            raise HttpError(413, f"The body is longer than {most} bytes.")
        while True:
            try:
                async with asyncio.timeout(settings.body_seconds):
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
        response.headers["x-request-id"] = self.id
        await response(self.request.scope, self._receive, self._send)

    async def stream(self, chunks: AsyncGenerator[Json, None]) -> None:
        """Send chunks as server-sent events, and a comment where none comes for a while.

        What goes wrong before the first is an answer of its own; later it is the last event.
        """
        coming = aiter(chunks)
        try:
            waiting = asyncio.ensure_future(anext(coming))
            value = await waiting  # before the status: an error still has one
            await self._start_stream()
            while True:
                await self._write(b"data: " + msgspec.json.encode(value) + b"\n\n")
                waiting = asyncio.ensure_future(anext(coming))
                while not (await asyncio.wait((waiting,), timeout=self._ping))[0]:
                    await self._write(b": ping\n")
                value = await waiting
        except StopAsyncIteration:
            await self._write(b"data: [DONE]\n\n", more=False)
        except HttpError as error:
            if not self.status:
                raise
            log.warning("%s: the stream ends with an error: %s", self.id, error)
            last = msgspec.json.encode({"error": error_body(error)})
            await self._write(b"data: " + last + b"\n\n", more=False)
        finally:
            if not waiting.done():
                waiting.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await waiting
            with suppress(RuntimeError):
                await chunks.aclose()

    @property
    def _ping(self) -> float:
        return self._front.settings.ping_seconds

    async def _start_stream(self) -> None:
        self.status = 200
        headers = {
            b"content-type": b"text/event-stream; charset=utf-8",
            b"cache-control": b"no-cache",
            b"x-accel-buffering": b"no",
            b"x-request-id": self.id.encode(),
        }
        start = {"type": "http.response.start", "status": 200, "headers": [*headers.items()]}
        await self._send(start)

    async def _write(self, body: bytes, *, more: bool = True) -> None:
        """Send a piece; Gone if the reader takes nothing for too long."""
        try:
            async with asyncio.timeout(self._front.settings.write_seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except (TimeoutError, OSError):
            raise Gone from None

    def stop_listening(self) -> None:
        """Wait for the client no longer."""
        if self._listening is not None:
            self._listening.cancel()


def error_body(error: HttpError) -> dict[str, Json]:
    """Return an error as OpenAI's clients read it."""
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if error.status == 429 else _ERROR_TYPES.get(error.status, usual)
    return {"message": str(error)[:2000], "type": kind, "param": None, "code": error.code}


class Responder:
    """The server of an exchange: who may ask, what went wrong, what ends when the client goes."""

    def __init__(self, front: Front, answer: Callable[[Exchange], Awaitable[None]]) -> None:
        self._front, self._answer = front, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._front, scope, receive, send)
        began = time.monotonic()
        self._front.open += 1
        try:
            await self._race(exchange)
        except Gone:
            exchange.status = 499
            self._front.metrics.left.inc()
        except HttpError as error:
            await self._refuse(exchange, error)
        except UnknownModelError as error:
            await self._refuse(exchange, HttpError(404, str(error), code="model_not_found"))
        except RequestError as error:
            await self._refuse(exchange, HttpError(400, str(error)))
        except EngineGone as error:
            await self._refuse(exchange, HttpError(503, str(error), retry=2))
        except EverystepError as error:
            await self._refuse(exchange, HttpError(400, str(error)))
        except Exception:
            log.exception("%s: a defect of the server", exchange.id)
            await self._refuse(
                exchange, HttpError(500, "A defect of the server; its log has more.")
            )
        finally:
            self._front.open -= 1
            exchange.stop_listening()
            seconds = time.monotonic() - began
            self._front.metrics.whole.observe(seconds)
            self._front.metrics.answers.labels(str(exchange.status)).inc()
            path = exchange.request.url.path if exchange.status != 404 else "(unknown)"
            log.info("%s %s %s %.3fs", exchange.id, path, exchange.status, seconds)

    async def _race(self, exchange: Exchange) -> None:
        """Answer, and stop where the client goes first."""
        self._admit(exchange)
        caller = exchange.caller
        CALLER.set(caller)  # which tasks that begin here inherit
        if exchange.request.method != "POST" or caller.background:
            await self._answer_or_leave(exchange)
            return
        try:
            with self._front.link.book.request(caller.key):
                await self._answer_or_leave(exchange)
        except QuotaError as error:
            raise HttpError(429, str(error), code="quota", retry=error.seconds) from error

    async def _answer_or_leave(self, exchange: Exchange) -> None:
        working = asyncio.ensure_future(self._answer(exchange))
        leaving = asyncio.create_task(exchange.left.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise Gone
            await working
        finally:
            leaving.cancel()
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)

    def _admit(self, exchange: Exchange) -> None:
        settings, headers = self._front.settings, exchange.request.headers
        if (inside := exchange.request.scope.get(INSIDE)) is not None:
            exchange.caller = inside
            return
        if not settings.hosts.accepts(headers.get("host", "")):
            raise HttpError(
                403, "The Host header names another server. Allow it with --allow-host."
            )
        if (origin := headers.get("origin")) is not None and origin not in settings.origins:
            raise HttpError(403, "Pages of this origin may not ask. Allow it with --allow-origin.")
        path = exchange.request.url.path
        if settings.keys and path not in _OPEN:
            said = key_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
            owner = settings.keys.owner(said)
            if owner is None:
                raise HttpError(401, "There is no such key.", code="invalid_api_key")
            exchange.caller = Caller(owner)
        if self._front.draining and exchange.request.method == "POST":
            raise HttpError(503, "The server is being stopped.", code="draining", retry=5)

    async def _refuse(self, exchange: Exchange, error: HttpError) -> None:
        if exchange.status:  # too late: what was sent stands
            return
        headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if error.status >= 500 and error.status != 503:
            headers["x-should-retry"] = "false"
        with suppress(OSError):
            await exchange.answer({"error": error_body(error)}, error.status, headers)
