"""Runs over HTTP: `everystep.open` and what is done with it, by the names that it has there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress

from starlette.responses import Response
from starlette.routing import Route

from everystep.server import routes
from everystep.server.application import Front, Responder
from everystep.server.asking import addressee, calling, read_changes, read_ids, read_open
from everystep.server.exchange import Exchange, HttpError
from everystep.server.fields import Json
from everystep.server.line import LinePlace
from everystep.server.link import EngineGone
from everystep.server.live_runs import (
    LiveRun,
    LiveRuns,
    RunLimits,
)
from everystep.server.messages import Failed, RunAsk, RunNews, RunOver
from everystep.server.routes import RouteTable

_PATH = routes.RUN_OPEN.path
_SWEEPS = 20
"""Looks for runs that were left alone, within the time for which one may be."""
_STEPPING = ("open", "resume", "step", "result", "more", "explain", "fork")
"""What may feed ids or take steps, and so waits in line."""
_USUAL_STEPS = 64
Verb = Callable[[Exchange, LiveRun, Mapping[str, Json]], Awaitable[None]]
Answer = Callable[[Exchange], Awaitable[None]]


class RunRoutes:
    """The routes of runs."""

    def __init__(self, front: Front, limits: RunLimits | None = None) -> None:
        own = limits or RunLimits()
        self._front = front
        self._pause = own.idle_seconds / _SWEEPS
        self.runs = LiveRuns(own, lambda: front.link.restarts)
        self._sweeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Return what the application serves."""
        verbs: Sequence[tuple[RouteTable, Verb]] = (
            (routes.RUN_STEP, self._step),
            (routes.RUN_RESULT, self._told),
            (routes.RUN_MORE, self._told),
            (routes.RUN_SEND, self._given),
            (routes.RUN_EDIT, self._given),
            (routes.RUN_REWIND, self._changed),
            (routes.RUN_SET, self._set),
            (routes.RUN_FORK, self._fork),
            (routes.RUN_EXPLAIN, self._told),
            (routes.RUN_SAVE, self._save),
        )
        found: list[tuple[str, str, Answer]] = [
            ("POST", _PATH, self._open),
            ("GET", _PATH, self._list),
            ("POST", f"{_PATH}/resume", self._resume),
            ("GET", f"{_PATH}/{{id}}", self._look),
            ("DELETE", f"{_PATH}/{{id}}", self._cancel),
        ]
        found += [("POST", table.path, self._verb(table, act)) for table, act in verbs]
        return [
            Route(path, Responder(self._front, answer), methods=[method])
            for method, path, answer in found
        ]

    def start(self) -> None:
        """End runs that are left alone, from now on."""
        self._sweeping = asyncio.create_task(self._sweep())

    async def close(self) -> None:
        """Look for them no longer."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._pause)
            for one in self.runs.expired():
                with suppress(HttpError, EngineGone):
                    await self._ask(one.to.model, one.id, "cancel")

    # --- beginning and ending ---------------------------------------------------------------------

    async def _open(self, exchange: Exchange) -> None:
        given = await exchange.fields(routes.RUN_OPEN)
        to = addressee(given.get("model"), self._front.link.models, self._front.models)
        opened = await asyncio.to_thread(read_open, given, to, exchange.caller)
        one = self.runs.add(exchange.caller.key, to)
        await exchange.answer(await self._begun(one, one.id, "open", opened))

    async def _resume(self, exchange: Exchange) -> None:
        name = exchange.request.query_params.get("model")
        to = addressee(name, self._front.link.models, self._front.models)
        kind = exchange.request.headers.get("content-type", "")
        if kind != "application/octet-stream":
            raise HttpError(415, "The body is not application/octet-stream.")
        data = bytearray()
        async for piece in exchange.pieces(self._front.settings.body_bytes):
            data += piece
        one = self.runs.add(exchange.caller.key, to)
        body = await self._begun(one, one.id, "resume", {"model": to.model}, bytes(data))
        await exchange.answer(body)

    async def _fork(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        changes = await asyncio.to_thread(read_changes, given, run.to)
        twin = self.runs.add(run.owner, run.to)
        body = await self._begun(twin, run.id, "fork", {"name": twin.id, "changes": changes})
        await exchange.answer(body)

    async def _begun(
        self, one: LiveRun, name: str, verb: str, given: Mapping[str, Json], data: bytes = b""
    ) -> dict[str, Json]:
        """Return how a run stands that is new; it is forgotten where it could not begin."""
        try:
            over = await self._ask(one.to.model, name, verb, given, data)
        except BaseException:
            self.runs.drop(one)
            ending = asyncio.get_running_loop().create_task(self._end(one))
            self._ending.add(ending)  # or it might be collected before it has run
            ending.add_done_callback(self._ending.discard)
            raise
        self.runs.free(one)
        return _shown(one, over.body)

    async def _end(self, one: LiveRun) -> None:
        """End a run that may have begun, though nobody waits for it."""
        with suppress(HttpError, EngineGone):
            await self._ask(one.to.model, one.id, "cancel")

    async def _cancel(self, exchange: Exchange) -> None:
        one = self._own(exchange)
        with self.runs.used(one):
            self.runs.drop(one)
            over = await self._ask(one.to.model, one.id, "cancel")
        await exchange.answer(_shown(one, over.body))

    # --- looking and changing ---------------------------------------------------------------------

    async def _list(self, exchange: Exchange) -> None:
        own = self.runs.listed(exchange.caller.key)
        data = [{"id": one.id, "object": "everystep.run", "model": one.to.name} for one in own]
        await exchange.answer({"object": "list", "data": data})

    async def _look(self, exchange: Exchange) -> None:
        one = self._own(exchange)
        self.runs.touch(one)
        await exchange.answer(_shown(one, (await self._ask(one.to.model, one.id, "look")).body))

    def _verb(self, table: RouteTable, act: Verb) -> Answer:
        """Return what reads the body of a table and acts on the run."""

        async def answer(exchange: Exchange) -> None:
            one = self._own(exchange)
            given = await exchange.fields(table)
            with self.runs.used(one):
                await act(exchange, one, given)

        return answer

    async def _step(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        asked = {"steps": given.get("steps", 1), "best": given.get("best")}
        if given.get("stream"):
            await exchange.stream(self._steps(run, asked))
            return
        steps: list[Json] = []
        over = await self._ask(run.to.model, run.id, "step", asked, told=steps)
        await exchange.answer({"steps": steps, "run": _shown(run, over.body)})

    async def _steps(self, run: LiveRun, asked: Mapping[str, Json]) -> AsyncGenerator[Json, None]:
        """Yield steps as they are taken, and then how the run stands."""
        async with aclosing(self._news(run.to.model, run.id, "step", asked)) as news:
            async for message in news:
                if isinstance(message, RunNews):
                    yield {"object": "everystep.step", **message.step}
                else:
                    yield _shown(run, message.body)

    async def _told(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        verb = exchange.request.url.path.rpartition("/")[2]
        body = (await self._ask(run.to.model, run.id, verb, given)).body
        told = {"run": _shown(run, body["run"])} if "run" in body else {}
        await exchange.answer({**body, **told})

    async def _given(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        rest = {name: one for name, one in given.items() if name not in ("ids", "text")}
        ids = await asyncio.to_thread(read_ids, given, run.to)
        await self._changed(exchange, run, {**rest, "ids": ids})

    async def _set(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        await self._changed(exchange, run, await asyncio.to_thread(read_changes, given, run.to))

    async def _changed(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        verb = exchange.request.url.path.rpartition("/")[2]
        await exchange.answer(
            _shown(run, (await self._ask(run.to.model, run.id, verb, given)).body)
        )

    async def _save(self, exchange: Exchange, run: LiveRun, given: Mapping[str, Json]) -> None:
        over = await self._ask(run.to.model, run.id, "save", given)
        await exchange.send(Response(over.data, media_type="application/octet-stream"))

    # --- the engine -------------------------------------------------------------------------------

    def _own(self, exchange: Exchange) -> LiveRun:
        return self.runs.find(exchange.caller.key, exchange.request.path_params["id"])

    async def _ask(
        self,
        model: str,
        name: str,
        verb: str,
        given: Mapping[str, Json] = {},
        data: bytes = b"",
        told: list[Json] | None = None,
    ) -> RunOver:
        """Return what came of something that is done to a run; steps are added to `told`."""
        async with aclosing(self._news(model, name, verb, given, data)) as news:
            async for message in news:
                if isinstance(message, RunNews) and told is not None:
                    told.append(message.step)
                if isinstance(message, RunOver):
                    return message
        raise EngineGone("the engine said nothing of the run", do="Open it again")

    async def _news(
        self,
        model: str,
        name: str,
        verb: str,
        given: Mapping[str, Json],
        data: bytes = b"",
    ) -> AsyncGenerator[RunNews | RunOver, None]:
        """Yield what comes of something that is done to a run, `RunOver` last."""
        front = self._front
        if not front.link.ready:
            raise HttpError(503, "the engine is being started", code="engine_starting", retry=2)
        place = _place(front, verb, given)
        number, owner = front.link.next_number(), calling().flow
        kept = calling().records if verb in ("open", "resume") else None
        record = None if kept is None else kept.another()
        ask = RunAsk(number, name, verb, dict(given), data, model, record, owner)
        deadline, loop = front.settings.deadline, asyncio.get_running_loop()
        late = None if deadline is None else loop.time() + deadline
        async with aclosing(front.link.follow(ask, place)) as news:
            while True:
                # Not around the whole: each step of a stream is awaited by a task of its own.
                left = None if late is None else max(late - loop.time(), 0.0)
                async with front.within(left, f"{verb} was done"):
                    message = await anext(news)
                if isinstance(message, Failed):
                    raise front.failure(message, None)
                if isinstance(message, RunNews | RunOver):
                    yield message
                if isinstance(message, RunOver):
                    return


def _place(front: Front, verb: str, given: Mapping[str, Json]) -> LinePlace | None:
    """Return the place in line of something that is done to a run, None where it steps nowhere."""
    if verb not in _STEPPING:
        return None
    tokens = int(given.get("steps") or 0) or (_USUAL_STEPS if verb in ("result", "more") else 0)
    return front.place(len(given.get("prompt") or ()), "run", tokens=tokens)


def _shown(run: LiveRun, body: Mapping[str, Json]) -> dict[str, Json]:
    """Return how a run stands, as clients read it."""
    return {"id": run.id, "object": "everystep.run", "model": run.to.name, **body}
