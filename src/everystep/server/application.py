"""The application: routes, answers and errors of HTTP.

One responder serves every route: while it works it listens whether the client is still there, and
what is under way ends when it has gone.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from everystep._version import __version__
from everystep.errors import CapacityError, OversizeError, RequestError
from everystep.server.access import key_of
from everystep.server.answering import Head, Streamed, Usage, finite
from everystep.server.anthropic_wire import ANTHROPIC_FORM, count_tokens
from everystep.server.asking import (
    CALLER,
    Addressee,
    Caller,
    FrontModel,
    Wanted,
    addressee,
    calling,
    read_messages,
    read_score,
    rendered_text,
)
from everystep.server.chat_page import PAGE_PATHS, page_response
from everystep.server.documents import openapi
from everystep.server.exchange import (
    OPENAI_FORM,
    Exchange,
    FrontSettings,
    Gone,
    HttpError,
    WireForm,
    defect,
)
from everystep.server.faults import as_http_error
from everystep.server.fields import Json
from everystep.server.inside import INSIDE
from everystep.server.line import LinePlace
from everystep.server.link import EngineLink, News
from everystep.server.messages import Begun, Failed, Likelihoods, Over, RowNews, ScoredTexts
from everystep.server.metrics import RequestWatch, ServerMetrics
from everystep.server.pictures import shows_pictures
from everystep.server.quotas import QuotaError
from everystep.server.request_log import METHODS, UNKNOWN, RequestLog, lost_lines
from everystep.server.responses_wire import KeptResponses, count_input_tokens
from everystep.server.routes import (
    APPLY_TEMPLATE,
    COUNT_TOKENS,
    DETOKENIZE,
    INPUT_TOKENS,
    SCORE,
    TOKENIZE,
    RouteTable,
)
from everystep.server.services import GeneratingRoute, generating_routes
from everystep.server.tracing import RequestTrace

log = logging.getLogger("everystep.server")

_OPEN = ("/health", "/ready", *PAGE_PATHS)
"""Routes that need no key."""


_ANY = "/{rest:path}"
"""The route of what has none."""
_LOAD, _REPLICAS = "/v1/everystep/load", "/v1/everystep/replicas"
_MOST_HELD = 512 << 20
"""Bytes of pictures that requests under way may hold together."""
_MOST_READ = 16
"""Messages that are read ahead of who writes a stream; what is not read waits in the engine."""
Read = TypeVar("Read")
Answerer = Callable[[Exchange], Awaitable[None]]


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
        self.metrics = ServerMetrics(vllm=self.settings.vllm_metrics)
        self.kept = KeptResponses()
        self.draining = False
        self.open = self._held = 0
        self.seeing = asyncio.Semaphore(1)  # around what decodes pictures and sounds
        self._created, self._began = int(time.time()), time.monotonic()
        self.application = Starlette(routes=self._routes(), middleware=self._shared())
        self.application.router.redirect_slashes = False
        self.application.router.default = Responder(self, _nowhere)

    def _shared(self) -> list[Middleware]:
        """Return what each request passes: the log, and what tells browsers that pages of the
        allowed origins may read answers."""
        logged = Middleware(RequestLog, often=(_LOAD, _REPLICAS))
        if not (allowed := self.settings.origins):
            return [logged]
        return [
            logged,
            Middleware(
                CORSMiddleware,
                allow_origins=allowed,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["*"],
            ),
        ]

    def _routes(self) -> list[Route]:
        def post(path: str, answer: Answerer, form: WireForm = OPENAI_FORM) -> Route:
            return Route(path, Responder(self, answer, form), methods=["POST"])

        def get(path: str, answer: Answerer) -> Route:
            return Route(path, Responder(self, answer), methods=["GET"])

        return [
            *(self._generating(one) for one in generating_routes(self.kept)),
            post(COUNT_TOKENS.path, self._count_tokens, ANTHROPIC_FORM),
            post(INPUT_TOKENS.path, self._input_tokens),
            get("/v1/responses/{id}", self._show_response),
            Route("/v1/responses/{id}", Responder(self, self._forget_response), methods=["DELETE"]),
            post(TOKENIZE.path, self._tokenize),
            post(DETOKENIZE.path, self._detokenize),
            post(APPLY_TEMPLATE.path, self._apply_template),
            get("/tokenizer_info", self._tokenizer_info),
            post(SCORE.path, self._score),
            get("/v1/models", self._list_models),
            get("/v1/models/{name:path}", self._show_model),
            get("/health", self._health),
            get("/ready", self._readiness),
            get("/metrics", self._metrics),
            get("/openapi.json", self._openapi),
            get("/version", self._told_version),
            get(_LOAD, self._load),
            get(_REPLICAS, self._replicas),
            *(get(path, _page) for path in PAGE_PATHS),
            self._any(),
        ]

    def _any(self) -> Route:
        """Return the route of what has none, with line breaks in it too."""
        found = Route(_ANY, Responder(self, _nowhere), methods=[*METHODS])
        found.path_regex = re.compile(found.path_regex.pattern, re.DOTALL)
        return found

    def _generating(self, service: GeneratingRoute) -> Route:
        async def answer(exchange: Exchange) -> None:
            await self._generate(exchange, service)

        responder = Responder(self, answer, service.form)
        return Route(service.route.path, responder, methods=["POST"])

    def add(self, routes: Iterable[Route]) -> None:
        """Serve further routes."""
        self.application.router.routes[-1:-1] = routes  # the last one is for what has no route

    # --- generating -------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange, service: GeneratingRoute) -> None:
        tracing = self.settings.tracing
        if tracing is None:
            await self._generate_traced(exchange, service, None)
            return
        with tracing.request(exchange.request.headers, service.prefix) as trace:
            await self._generate_traced(exchange, service, trace)

    async def _generate_traced(
        self, exchange: Exchange, service: GeneratingRoute, trace: RequestTrace | None
    ) -> None:
        given, to = await self._read(exchange, service.route)
        if self.settings.deadline is not None:
            given["timeout"] = min(given.get("timeout", 1e9), self.settings.deadline)
        wanted = await self._aside(given, service.read, given, to, exchange.caller)
        if trace is not None:
            trace.asked(wanted)
        self.require_room(sum(len(ids) for ids, _ in wanted.prompts), len(wanted.prompts))
        with self.holding(sum(len(one.data) for one in wanted.pictures)):
            await self._answer(exchange, service, wanted, trace)

    async def _aside(
        self, given: Mapping[str, Json], read: Callable[..., Read], *arguments: object
    ) -> Read:
        """Return what a body asks for, read in a thread: templates and long texts take their time,
        which is nobody else's. Bodies with pictures are read one after another, since each of them
        takes much memory."""
        if not shows_pictures(given.get("messages")):
            return await asyncio.to_thread(read, *arguments)
        async with self.seeing:
            return await asyncio.to_thread(read, *arguments)

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Hold pictures of so many bytes while the body runs; 429 where there are too many."""
        if size and self._held and self._held + size > _MOST_HELD:
            self.metrics.rejections.inc()
            text = "too many pictures wait"
            raise HttpError(429, text, code="queue_full", retry=self.link.pause())
        self._held += size
        try:
            yield
        finally:
            self._held -= size

    async def _answer(
        self,
        exchange: Exchange,
        service: GeneratingRoute,
        wanted: Wanted,
        trace: RequestTrace | None,
    ) -> None:
        to = wanted.to
        head = Head(f"{service.prefix}{exchange.id}", to.name)
        most = wanted.keywords.get("max_new_tokens")
        watch = RequestWatch(self.metrics, to.name, most, wanted.answers)

        def over(usage: Usage) -> None:
            self.count(exchange, to, usage)
            if trace is not None:
                trace.answered(head.id, usage, watch.reasons, watch.first)

        if wanted.stream and service.streamed is not None:
            streamed = service.streamed(wanted, head)
            failure = await exchange.stream(self._chunks(wanted, streamed, watch))
            over(streamed.usage)
            if trace is not None and failure is not None:
                trace.failed(failure)
            return
        answer, notices = service.whole(wanted, head), dict[str, None]()
        async with aclosing(self._follow(wanted, watch)) as news:
            async for number, message in news:
                if isinstance(message, Begun):
                    notices |= dict.fromkeys(message.notices)
                    answer.begin(number, message)
                elif isinstance(message, Over):
                    _refuse_late(message)
                    if wanted.is_wide:
                        await asyncio.to_thread(answer.end, number, message)
                    else:
                        answer.end(number, message)
        over(answer.usage)
        warnings = {"warnings": [*notices]} if notices else {}
        await exchange.answer(answer.shown() | warnings)

    async def _chunks(
        self, wanted: Wanted, answer: Streamed, watch: RequestWatch
    ) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream, the first one once the engine has begun."""
        opened = told = False
        try:
            async with aclosing(self._follow(wanted, watch)) as news:
                async for number, message in news:
                    if not opened:
                        opened = True
                        for chunk in answer.opening():
                            told = True
                            yield chunk
                    chunks: Iterable[Json] = ()
                    if isinstance(message, Begun):
                        answer.begin(number, message)
                    elif isinstance(message, RowNews):
                        chunks = answer.row(number, message)
                    elif isinstance(message, Over):
                        if not told:
                            _refuse_late(message)
                        chunks = answer.end(number, message)
                    for chunk in chunks:
                        told = True
                        yield chunk
        except HttpError as error:
            for chunk in answer.failing(str(error)) if opened else ():
                yield chunk
            raise
        for chunk in answer.closing():
            yield chunk

    async def _follow(
        self, wanted: Wanted, watch: RequestWatch
    ) -> AsyncGenerator[tuple[int, News], None]:
        """Yield what becomes of every prompt, with its number; raise what one of them fails with.

        Leaving the iterator ends them all.
        """
        places = wanted.places(calling())
        for place in places:
            self._require_possible(place)
        asks = wanted.asks([self.link.next_number() for _ in wanted.prompts])
        news: asyncio.Queue[tuple[int, News]] = asyncio.Queue(_MOST_READ)

        async def pump(number: int) -> None:
            try:
                async with aclosing(self.link.follow(asks[number], places[number])) as messages:
                    async for message in messages:
                        await news.put((number, message))
            except Exception:  # or whoever reads the news would wait for ever
                log.exception("following a prompt failed")
                await news.put((number, Failed(asks[number].id, 500, "the server failed")))

        pumps = [asyncio.create_task(pump(number)) for number in range(len(asks))]
        try:
            left = len(asks)
            while left:
                number, message = await news.get()
                watch.note(number, message)
                if isinstance(message, Failed):
                    raise self.failure(message, wanted)
                if isinstance(message, RowNews) and message.fails:
                    continue
                if isinstance(message, RowNews) and message.kind == "time" and message.token < 0:
                    continue  # `Over` says it next, and whether there was a token at all
                left -= isinstance(message, Over)
                yield number, message
        finally:
            for one in pumps:
                one.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def failure(self, message: Failed, wanted: Wanted | None) -> HttpError:
        """Return the error that says what failed, with fields named as the request named them."""
        text = message.text if wanted is None else wanted.respelled(message.text)
        retry = self.link.pause() if message.status in (429, 503) else None
        return HttpError(message.status, text, retry=retry)

    def require_room(self, positions: int, asks: int) -> None:
        """Raise HttpError where so many more ids and asks are too many to wait."""
        if not self.link.ready:
            raise HttpError(503, "the engine is being started", code="engine_starting", retry=2)
        caller = calling()
        if caller.background:  # how much of that there is, is bounded by who asks
            return
        try:
            self.link.book.require_tokens(caller.key, positions)
            self.link.require_room(positions, asks)
        except (OversizeError, QuotaError):
            raise
        except CapacityError as error:
            self.metrics.rejections.inc()
            raise HttpError(429, str(error), code="queue_full", retry=self.link.pause()) from error

    def place(self, positions: int, lane: str, priority: int = 0, tokens: int = 0) -> LinePlace:
        """Return the place in line of what needs no rows; HttpError where too much waits."""
        self.require_room(positions, 1)
        own = calling()
        return LinePlace(own.key, positions, tokens, 0, priority, own.background, lane)

    @asynccontextmanager
    async def within(self, timeout: float | None, before: str) -> AsyncGenerator[None, None]:
        """Raise HttpError where the block takes longer than a request may, or than it said."""
        known = [one for one in (timeout, self.settings.deadline) if one is not None]
        try:
            async with asyncio.timeout(min(known, default=None)):
                yield
        except TimeoutError:
            what = f"The deadline passed before {before}."
            raise HttpError(408, what, code="deadline") from None

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

    def count(self, exchange: Exchange, to: Addressee, usage: Usage) -> None:
        """Count the tokens of an answer."""
        line = exchange.line
        line.prompt_tokens, line.cached_tokens = usage.prompt, usage.cached
        line.completion_tokens = usage.completion
        self.metrics.count("prompt_tokens", to.name, usage.prompt)
        self.metrics.count("prompt_tokens_cached", to.name, usage.cached)
        self.metrics.count("generation_tokens", to.name, usage.completion)

    async def _read(
        self, exchange: Exchange, route: RouteTable
    ) -> tuple[dict[str, Json], Addressee]:
        """Return the fields of a body, and who is meant."""
        given = await exchange.fields(route)
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
                return read_messages(given, to).ids
            special = given.get("add_special_tokens", True)
            return list(tokenizer.encode(str(text), add_special_tokens=special))

        found = await self._aside(given, ids)
        answer = {"count": len(found), "max_model_len": to.facts.context, "tokens": found}
        if given.get("return_token_strs"):
            answer["token_strs"] = [tokenizer.decode([one]) for one in found]
        await exchange.answer(answer)

    async def _apply_template(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, APPLY_TEMPLATE)
        text = await self._aside(given, rendered_text, given, to)
        await exchange.answer({"prompt": text})

    async def _tokenizer_info(self, exchange: Exchange) -> None:
        name = exchange.request.query_params.get("model")
        to = addressee(name, self.link.models, self.models)
        tokenizer = to.front.tokenizer
        known = tokenizer.special_tokens_map
        await exchange.answer(
            {
                "model": to.model,
                **{name: known.get(name) for name in ("bos_token", "eos_token", "pad_token")},
                **known,
                "chat_template": tokenizer.chat_template,
                "vocab_size": to.facts.vocabulary,
                "max_model_len": to.facts.context,
            }
        )

    async def _count_tokens(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, COUNT_TOKENS)
        found = await self._aside(given, count_tokens, given, to)
        await exchange.answer({"input_tokens": found})

    async def _input_tokens(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, INPUT_TOKENS)
        found = await asyncio.to_thread(count_input_tokens, given, to, exchange.caller, self.kept)
        await exchange.answer({"object": "response.input_tokens", "input_tokens": found})

    async def _show_response(self, exchange: Exchange) -> None:
        id = exchange.request.path_params["id"]
        await exchange.answer(self.kept.find(exchange.caller, id).shown)

    async def _forget_response(self, exchange: Exchange) -> None:
        id = exchange.request.path_params["id"]
        self.kept.forget(exchange.caller, id)
        await exchange.answer({"id": id, "object": "response", "deleted": True})

    async def _detokenize(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, DETOKENIZE)
        decode = to.front.tokenizer.decode
        text = await asyncio.to_thread(decode, given["tokens"], skip_special_tokens=False)
        await exchange.answer({"prompt": text})

    async def _score(self, exchange: Exchange) -> None:
        given, to = await self._read(exchange, SCORE)
        ask = await asyncio.to_thread(read_score, given, to, self.link.next_number())
        place = self.place(sum(map(len, ask.rows)), "score", given.get("priority", 0))
        limit = self.within(given.get("timeout"), "the texts were scored")
        found: list[Likelihoods] = []
        async with limit, aclosing(self.link.follow(ask, place)) as news:
            async for message in news:
                if isinstance(message, Failed):
                    raise self.failure(message, None)
                if isinstance(message, ScoredTexts):
                    found = message.rows
        scores = [_shown_score(one) for one in found]
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
            known = {"steering": one.steering} if one.steering else {}
            own = {"root": one.name, "parent": None, **size, **known}
            found.append({"id": one.name, **about, **own})
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
        await exchange.answer({"status": "ready", "models": self.link.presence.shown()})

    async def _metrics(self, exchange: Exchange) -> None:
        self.metrics.ready.set(self.link.ready)
        self.metrics.restarts.set(self.link.restarts)
        self.metrics.replicas.set(self.link.replicas)
        self.metrics.replica_deaths.set(self.link.replica_deaths)
        self.metrics.tallies(self.link.tallies.shown())
        self.metrics.log_lost.set(lost_lines())
        self.metrics.models(self.link.presence.shown(), self.link.presence.loads)
        kind = "text/plain; version=0.0.4; charset=utf-8"
        await exchange.send(Response(self.metrics.shown(self.link.load()), media_type=kind))

    async def _load(self, exchange: Exchange) -> None:
        link = self.link
        told = {"ready": link.ready, "running": link.running, "waiting": link.waiting}
        spent = {"generated_tokens": link.tokens, "seconds": time.monotonic() - self._began}
        shared = {"replicas": link.replicas, "replica_deaths": link.replica_deaths}
        models = {"models": link.presence.shown()}
        await exchange.answer({**told, "rows": link.rows, **spent, **shared, **models})

    async def _replicas(self, exchange: Exchange) -> None:
        link = self.link
        told = {"has_replicas": link.states is not None, "replicas": link.replicas}
        states = [msgspec.to_builtins(one) for one in link.states or ()]
        await exchange.answer({**told, "replica_deaths": link.replica_deaths, "data": states})

    async def _openapi(self, exchange: Exchange) -> None:
        await exchange.answer(openapi())

    async def _told_version(self, exchange: Exchange) -> None:
        await exchange.answer({"version": __version__})


async def _page(exchange: Exchange) -> None:
    await exchange.send(page_response(exchange.request.url.path))


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


# --- what every exchange has in common ---------------------------------------------------------


class Responder:
    """The server of an exchange: who may ask, what went wrong, what ends when the client goes."""

    def __init__(
        self,
        front: Front,
        answer: Answerer,
        form: WireForm = OPENAI_FORM,
    ) -> None:
        self._front, self._answer, self._form = front, answer, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self._front.settings, self._form, scope, receive, send)
        exchange.line.route = UNKNOWN if "\n" in scope["path"] else self._route_of(scope)
        self._front.open += 1
        try:
            await self._race(exchange)
        except Gone:
            exchange.status = 499
            self._front.metrics.left.inc()
        except Exception as error:
            await self._refuse(exchange, as_http_error(error) or defect(error, exchange.id))
        finally:
            self._front.open -= 1
            exchange.stop_listening()
            exchange.line.status = exchange.status
            self._front.metrics.answers.labels(str(exchange.status)).inc()

    def _route_of(self, scope: Scope) -> str:
        """Return the route that this serves, as the log names it."""
        for route in self._front.application.routes:
            if isinstance(route, Route) and route.endpoint is self and route.path != _ANY:
                return route.path_format
        return UNKNOWN

    async def _race(self, exchange: Exchange) -> None:
        """Answer, and stop where the client goes first."""
        self._admit(exchange)
        caller = exchange.caller
        CALLER.set(caller)  # which tasks that begin here inherit
        if exchange.request.method != "POST" or caller.background:
            await self._answer_or_leave(exchange)
            return
        with self._front.link.book.request(caller.key):
            await self._answer_or_leave(exchange)

    async def _answer_or_leave(self, exchange: Exchange) -> None:
        # The pattern of a path fits it with a line break at its end too.
        answer = _nowhere if "\n" in exchange.request.scope["path"] else self._answer
        working = asyncio.ensure_future(answer(exchange))
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
            exchange.caller, exchange.line.batch = inside, inside.background
            return
        if not settings.hosts.accepts(headers.get("host", "")):
            raise HttpError(
                403, "The Host header names another server. Allow it with --allow-host."
            )
        own = f"{exchange.request.url.scheme}://{headers.get('host', '')}"
        if headers.get("origin") not in (None, own, *settings.origins):
            raise HttpError(403, "Pages of this origin may not ask. Allow it with --allow-origin.")
        path = exchange.request.url.path
        if (settings.keys or settings.recorded) and path not in _OPEN:
            exchange.caller = self._caller(headers, exchange.request.method)
        if self._front.draining and exchange.request.method == "POST":
            raise HttpError(503, "The server is being stopped.", code="draining", retry=5)

    def _caller(self, headers: Headers, method: str) -> Caller:
        """Return whose key a request has; HttpError for none of those that open."""
        settings = self._front.settings
        said = key_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
        if (owner := settings.recorded.owner(said)) is not None:
            if settings.records is not None and method == "POST" and settings.records.full:
                raise HttpError(503, "The folder of records is full; the operator has to empty it.")
            return Caller(owner, records=settings.records)
        owner = settings.keys.owner(said)
        if owner is None and settings.keys:
            raise HttpError(401, "There is no such key.", code="invalid_api_key")
        return Caller(owner)

    async def _refuse(self, exchange: Exchange, error: HttpError) -> None:
        if exchange.status:  # too late: what was sent stands
            return
        exchange.place(error)
        headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if error.status >= 500 and error.status != 503:
            headers["x-should-retry"] = "false"
        with suppress(OSError):
            await exchange.answer(self._form.error(error, exchange.id), error.status, headers)
