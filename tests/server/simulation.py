"""Random clients of a whole server in virtual time, and a judge of everything they are told.

A world is replayed from its seed: what is asked, when, in which pieces, who goes away, who reads
slowly, when the engine is killed, when a step fails and when clocks jump. The front, the messages,
the engine's side, its desk, driver, engine and scheduler are the real ones, over the hash model,
which forgives no misuse of a row.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

import everystep as es
from everystep.api.model import LanguageModel
from everystep.drivers.driver import finished
from everystep.drivers.session import Session
from everystep.engine import audit
from everystep.server.access import Keys, digest_of
from everystep.server.application import Front
from everystep.server.asking import FrontModel
from everystep.server.exchange import FrontSettings
from everystep.server.host import EngineLimits
from everystep.server.line import WaitingLine
from everystep.server.link import EngineLink, QueueLimits
from everystep.server.live_runs import RunLimits
from everystep.server.pooling import Pooling, vector_of
from everystep.server.quotas import Quota, QuotaBook
from everystep.server.run_routes import RunRoutes
from everystep.testing import HashExecutor
from everystep.testing.tokenizer import tiny_tokenizer
from tests.server.virtual import FlakyExecutor, VirtualLoop, VirtualMooring, hash_model, virtual

TOKENIZER = tiny_tokenizer(320)
WORDS = ("the", "and", "of", "hello", "ünï", "it was", "in a", "0.5", "日本")
STRATEGIES: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"do_sample": True},
    {"do_sample": True},
    {"do_sample": True, "temperature": 1.5, "top_k": 20},
    {"do_sample": True, "num_return_sequences": 2},
    {"num_beams": 2},
    {"prompt_lookup_num_tokens": 3},
    {"choices": ["red", "green"]},
    {"logit_bias": {"90": 4.0}},
)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCORE, EMBEDDINGS, RUNS = "/v1/everystep/score", "/v1/embeddings", "/v1/everystep/runs"
LONG: dict[str, Any] = {"max_tokens": 3000, "ignore_eos": True}
SETTINGS = FrontSettings(body_seconds=2.0, write_seconds=3.0, ping_seconds=2.0)
IDLE = 60.0
"""Seconds for which a run may be left alone."""
LATEST = 1e4
"""Virtual seconds after which a request that is not answered is lost."""


class Wrong(AssertionError):
    """Somebody was told something wrong, twice or never, or something is left."""


# --- what is asked --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A body for a route, and what the library says to it: texts, ids and why each ends, or the
    numbers that it gives."""

    path: str
    body: dict[str, Any]
    texts: tuple[str, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    ends: tuple[str, ...] = ()
    data: tuple[Any, ...] = ()

    @property
    def generates(self) -> bool:
        return self.path in (COMPLETIONS, CHAT)


@functools.cache
def model() -> LanguageModel:
    return hash_model()


@functools.cache
def questions(shelf: int) -> list[Question]:
    """Questions that several worlds share, with their answers, computed alone."""
    chance = random.Random(f"questions {shelf}")
    return [_question(chance) for _ in range(40)]


def _question(chance: random.Random) -> Question:
    kind = chance.random()
    if kind < 0.06:
        return _score(chance)
    if kind < 0.12:
        return _embedding(chance)
    if kind < 0.18:
        return _run(chance)
    prompt: Any = " ".join(chance.choices(WORDS, k=chance.randint(1, 5)))
    path, field = COMPLETIONS, "prompt"
    if kind < 0.32:
        path, field = CHAT, "messages"
        prompt = [{"role": "user", "content": prompt}]
    elif chance.random() < 0.3:
        prompt = chance.choices(range(5, 300), k=chance.randint(1, 30))
    asked = {**chance.choice(STRATEGIES)}
    asked |= {"max_new_tokens": chance.choice((1, 1, 2, 3, 5)), "seed": chance.randint(0, 2**40)}
    if chance.random() < 0.2:
        asked["stop_strings"] = chance.sample(["a", "e", "\x1c", " th", "m"], 2)
    keywords = {**asked}
    if "stop_strings" in asked:
        keywords["trim_stop_strings"] = True
    if "logit_bias" in asked:
        keywords["logit_bias"] = {90: 4.0}
    found: Any = es.generate(model(), TOKENIZER, prompt, return_dict_in_generate=True, **keywords)
    results = found if isinstance(found, list) else [found]
    texts, tokens = zip(*((one.text, one.tokens) for one in results), strict=True)
    ends = tuple("length" if one.finish_reason.kind == "length" else "stop" for one in results)
    return Question(path, {field: prompt, **asked}, texts, tokens, ends)


def _score(chance: random.Random) -> Question:
    rows = [chance.choices(range(5, 300), k=chance.randint(2, 40)) for _ in range(3)]
    found = es.score(model(), TOKENIZER, rows)
    data = tuple((one.tokens.tolist(), one.logprobs.tolist()) for one in found)
    return Question(SCORE, {"texts": rows}, data=data)


def _embedding(chance: random.Random) -> Question:
    rows = [chance.choices(range(5, 300), k=chance.randint(1, 40)) for _ in range(2)]
    session = Session(model(), TOKENIZER, (), None, None, {}, gives_events=True)
    data = []
    for ids in rows:
        asked: dict[str, Any] = {"strategy": Pooling("mean"), "max_new_tokens": 1, "seed": 0}
        request = session.own_request(ids, 0, session.asked(ids, asked, 0.0))
        (group,) = finished(session.driver(request), [request])
        data.append(np.frombuffer(vector_of(group), "<f4").tolist())
    return Question(EMBEDDINGS, {"input": rows, "normalize": False}, data=tuple(data))


def _run(chance: random.Random) -> Question:
    prompt = chance.choices(range(5, 300), k=chance.randint(1, 30))
    asked: dict[str, Any] = {
        "max_new_tokens": chance.randint(1, 6),
        "seed": chance.randint(0, 2**40),
    }
    asked |= {"do_sample": True} if chance.random() < 0.5 else {}
    found = es.generate(model(), TOKENIZER, prompt, return_dict_in_generate=True, **asked)
    return Question(RUNS, {"prompt": prompt, **asked}, (found.text,), (found.tokens,))


# --- who asks -------------------------------------------------------------------------------------


@dataclass
class Client:
    """A client: what it asks and how, and what it was told.

    `leaves_at`: it goes away after so many pieces of the answer, None for never; `leaves_after`:
    after so many seconds. `pause`: seconds for which it reads nothing, between pieces. `slow`:
    seconds between pieces of its body.
    """

    number: int
    question: Question | None
    body: dict[str, Any]
    key: str | None
    leaves_at: int | None
    leaves_after: float | None
    pause: float
    slow: float
    cuts: int
    began: float = 0.0
    ended: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    told: bytearray = field(default_factory=bytearray)
    pieces: int = 0
    whole: bool = False
    left: bool = False

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def is_right(self) -> bool:
        return self.whole and self.status == 200

    def told_json(self) -> Any:
        return json.loads(bytes(self.told))

    def restart(self, body: dict[str, Any]) -> None:
        """Ask something else, after an answer."""
        self.body, self.told, self.status, self.pieces = body, bytearray(), 0, 0
        self.whole, self.headers = False, {}


def drawn(chance: random.Random, shelf: int, number: int, keys: list[str]) -> Client:
    """A client of chance."""
    key = chance.choice(keys) if keys else None
    if chance.random() < 0.03:  # it asks for very much, and goes away before
        body = {"prompt": "hello", **LONG, "stream": chance.random() < 0.7}
        leaves = chance.random() * 4
        return Client(number, None, body, key, None, leaves, 0.0, 0.0, 1)
    question = chance.choice(questions(shelf))
    body = {**question.body}
    if question.generates:
        body |= {"stream": chance.random() < 0.5, "return_token_ids": True}
    body |= {"model": "tiny"} if chance.random() < 0.1 else {}
    timed = question.path != RUNS and not {"num_beams", "stop_strings"} & set(body)
    if chance.random() < 0.08 and timed:
        body["timeout"] = chance.choice((0.01, 0.1, 0.5, 3.0))
    if chance.random() < 0.1 and question.path != RUNS:
        body["priority"] = chance.randint(-3, 3)
    leaves_at = chance.randint(0, 9) if chance.random() < 0.08 else None
    leaves_after = chance.random() ** 3 * 3 if chance.random() < 0.08 else None
    pause = chance.choice((0.1, 1.0, 10.0)) if chance.random() < 0.03 else 0.0
    slow = chance.choice((0.05, 0.5, 5.0)) if chance.random() < 0.03 else 0.0
    cuts = chance.randint(1, 3)
    return Client(number, question, body, key, leaves_at, leaves_after, pause, slow, cuts)


async def visit(world: World, client: Client) -> None:
    """Have the client ask what it asks: of a run several things, one after another."""
    if client.question is None or client.question.path != RUNS:
        await ask(world, client)
        return
    client.began = world.loop.time()
    await ask(world, client)
    known = [client.told_json()["id"]] if client.is_right else []
    for verb, body in (("step", {"steps": 2}), ("fork", {}), ("result", {})):
        if not client.is_right or client.left:
            break
        client.restart(body)
        await ask(world, client, f"{RUNS}/{known[0]}/{verb}")
        if verb == "fork" and client.is_right:
            known.append(client.told_json()["id"])
    for id in known:  # whatever became of them: nobody leaves a run open
        last = replace(client, body={}, leaves_at=None, leaves_after=None, left=False, pause=0.0)
        last.restart({})
        with suppress(Wrong):
            await ask(world, last, f"{RUNS}/{id}", "DELETE")


async def ask(world: World, client: Client, path: str | None = None, method: str = "POST") -> None:
    """Send the client's request to the application, and take down what comes."""
    question = client.question
    path = path or (COMPLETIONS if question is None else question.path)
    loop, left = world.loop, asyncio.Event()
    raw = json.dumps(client.body).encode()
    marks = sorted({0, *(world.chance.randint(0, len(raw)) for _ in range(client.cuts)), len(raw)})
    parts = [raw[start:stop] for start, stop in pairwise(marks)]
    client.began = client.began or loop.time()

    def leave() -> None:
        client.left = True
        left.set()

    async def receive() -> dict[str, Any]:
        if parts and not client.left:
            if client.slow:
                await asyncio.sleep(client.slow)
            if not client.left:
                body = parts.pop(0)
                return {"type": "http.request", "body": body, "more_body": bool(parts)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if client.left:
            raise OSError("the client has gone")
        if client.whole:
            raise Wrong("something comes after the end of an answer")
        if client.pause:
            await asyncio.sleep(client.pause)
        if message["type"] == "http.response.start":
            if client.status:
                raise Wrong("an answer begins twice")
            client.status = message["status"]
            client.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            client.told += message.get("body", b"")
            client.whole = not message.get("more_body", False)
        client.pieces += 1
        if client.leaves_at is not None and client.pieces > client.leaves_at:
            leave()

    if client.leaves_after is not None:
        loop.call_later(client.leaves_after, leave)
    headers = {b"host": b"localhost", b"content-type": b"application/json"}
    if client.key is not None:
        headers[b"authorization"] = f"Bearer {client.key}".encode()
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1"}
    scope |= {"scheme": "http", "method": method, "path": path, "query_string": b""}
    scope |= {"raw_path": path.encode(), "root_path": "", "headers": [*headers.items()]}
    scope |= {"client": None, "server": None}
    try:
        async with asyncio.timeout(LATEST):
            await world.front.application(scope, receive, send)
    except TimeoutError as error:
        raise Wrong(f"request {client.number} was never answered") from error
    client.ended = loop.time()


# --- a world --------------------------------------------------------------------------------------


class World:
    """A server with its clients, from one seed. `fates`: how many were answered how, and on which
    route."""

    def __init__(self, seed: int, requests: int) -> None:
        self.seed, self.requests = seed, requests
        self.chance = random.Random(f"world {seed}")
        self.fates: Counter[str] = Counter()
        self.transcript = hashlib.sha256()
        self.calm = False
        self.kills: list[float] = []
        self.downs: list[tuple[float, float]] = []  # without an engine that was ready
        self.faults: list[float] = []
        self.jumps: list[float] = []
        self.loop: VirtualLoop
        self.front: Front
        self.mooring: VirtualMooring

    def run(self) -> Counter[str]:
        """Live through it; Wrong, with the seed, where anybody was told anything wrong."""
        try:
            with virtual(random.Random(f"order {self.seed}")) as loop:
                self.loop = loop
                loop.run_until_complete(asyncio.wait_for(self._live(), 5 * LATEST))
                if loop.defects:
                    raise Wrong(f"a task failed on its own: {loop.defects[:3]}")
        except Exception as error:
            raise Wrong(
                f"replay with World({self.seed}, {self.requests}).run(): {error!r}"
            ) from error
        return self.fates

    async def _live(self) -> None:
        chance, loop = self.chance, self.loop
        self.crowded = chance.random() < 0.5
        limits = EngineLimits(chance.choice((4, 16, 32)), chance.choice((32, 1024)))
        keys = ["a", "b", "c"] if chance.random() < 0.5 else []
        queue = QueueLimits(chance.randint(3, 40), 2000) if self.crowded else QueueLimits(10**6)
        quota = Quota(requests=6, rows=5) if self.crowded and chance.random() < 0.5 else None
        clock = loop.clock
        book = QuotaBook(quota, {digest_of("a"): Quota(weight=2.0)}, clock)
        self.mooring = VirtualMooring(loop, model(), TOKENIZER, limits)
        self.link = EngineLink(self.mooring, queue, book, hang_seconds=3.0, clock=clock)
        settings = replace(SETTINGS, keys=Keys([digest_of(one) for one in keys]))
        known = {"tiny": FrontModel(TOKENIZER, model().chat_defaults)}
        self.front = Front(self.link, known, settings)
        runs = RunRoutes(self.front, RunLimits(10**6, 10**6, IDLE))
        runs.runs._clock = clock
        self.front.add(runs.routes())
        await self.link.start()
        runs.start()
        watching = loop.create_task(self._watch())
        shelf = self.seed % 8
        clients = [drawn(chance, shelf, number, keys) for number in range(self.requests)]
        gap = 0.005 * chance.choice((1, 2, 8))
        troubles = loop.create_task(self._trouble(self.requests * gap / 8))
        await self._come(clients, gap)
        self.calm = True  # what has begun to go wrong does so to its end
        await troubles
        await self._leave_last(keys)
        await self._require_nothing_left()
        watching.cancel()
        await runs.close()
        for client in clients:
            self.judge(client)
        await self.link.close()
        assert self.mooring.task is not None
        await asyncio.gather(self.mooring.task, return_exceptions=True)
        if self.link.restarts != len(self.kills):
            raise Wrong(f"{len(self.kills)} kills and {self.link.restarts} restarts")

    async def _leave_last(self, keys: list[str]) -> None:
        """Ask for very much and go away, when nothing is left that would end it otherwise."""
        await self.link.wait_ready(100.0)
        key = keys[0] if keys else None
        bodies = [{"prompt": "hello", **LONG, "stream": stream} for stream in (True, False)]
        last = [Client(-1, None, one, key, None, 1.0, 0.0, 0.0, 1) for one in bodies]
        await asyncio.gather(*(ask(self, one) for one in last))

    async def _come(self, clients: list[Client], gap: float) -> None:
        """Let the clients come, some at once and some apart; return when all are answered."""
        asking: list[asyncio.Task[None]] = []
        for client in clients:
            if self.chance.random() < 0.6:
                await asyncio.sleep(self.chance.expovariate(1 / gap))
            if self.chance.random() < 0.95:  # the others find that the engine is being started
                await self.link.wait_ready(100.0)
            asking.append(self.loop.create_task(visit(self, client)))
        await asyncio.gather(*asking)

    async def _trouble(self, mean: float) -> None:
        """Kill and freeze engines, let steps fail, and let clocks jump, for as long as it lasts."""
        chance, loop = self.chance, self.loop
        for _ in range(16):
            await asyncio.sleep(chance.expovariate(1 / mean))
            if self.calm:
                return
            what = chance.random()
            if what < 0.1:
                if await self.link.wait_ready(100.0):
                    known = self.link.restarts
                    self.mooring.freeze()
                    while self.link.restarts == known:
                        await asyncio.sleep(0.1)
                    self.kills.append(loop.time())
            elif what < 0.5:
                for _ in range(chance.choice((1, 1, 2, 3))):
                    if await self.link.wait_ready(100.0):
                        self.kills.append(loop.time())
                        self.mooring.kill()
                        await asyncio.sleep(0.1 + chance.random() * 0.2)
            elif what < 0.7:
                self.faults.append(loop.time())
                FlakyExecutor.fails += chance.choice((1, 1, 8))
            else:
                self.jumps.append(loop.time())
                loop.clock.now += chance.choice((0.5, 20.0, 400.0))
                loop.clock.wall += chance.choice((-1e6, -5.0, 5.0, 1e6))

    async def _watch(self) -> None:
        """Take down when no engine was ready."""
        while True:
            await asyncio.sleep(0.05)
            if not self.link.ready:
                since = self.loop.time() - 0.1
                await self.link.wait_ready(1e6)
                self.downs.append((since, self.loop.time()))

    # --- judging ----------------------------------------------------------------------------------

    def judge(self, client: Client) -> None:
        """Refuse what the client was told, if anything of it is wrong or not to be explained."""
        fate = self._fate(client)
        self.fates[fate] += 1
        if fate in ("answered", "streamed") and client.question is not None:
            self.fates[client.question.path] += 1
        told = re.sub(rb'"id":"[^"]*"', b"", bytes(client.told))
        self.transcript.update(f"{client.number} {fate} {client.ended:.6f}".encode() + told)

    def _fate(self, client: Client) -> str:
        if client.left:
            if client.streams and client.status == 200:
                self._require_stream(client, ends=False)
            return "left"
        if not client.whole:
            late = client.pause > SETTINGS.write_seconds or self._during(self.jumps, client)
            _require(late, client, "the answer was cut short")
            return "slow reader"
        if client.status == 200 and client.streams:
            return self._require_stream(client, ends=True)
        body = json.loads(client.told)
        if client.status == 200:
            _require(client.question is not None, client, "there is no end to this")
            self._require_answer(client, body)
            return "answered"
        self._require_reason(client, client.status, body["error"])
        return f"refused {client.status}"

    def _require_reason(self, client: Client, status: int, error: dict[str, Any]) -> None:
        """Refuse an error that nothing has caused."""
        text = error["message"]
        timed = "timeout" in client.body
        # Who asks before a death is noticed has asked the engine that died.
        died = sum(client.began - 0.05 <= at <= client.ended + 0.3 for at in self.kills)
        if status == 503 and error["code"] == "engine_starting":
            due = any(since <= client.ended and client.began <= at for since, at in self.downs)
            due |= self._during(self.jumps, client)
        elif status == 503:
            timed |= client.question is not None and client.question.path == RUNS
            due = "died while it worked" in text and died >= (1 if timed else 2)
        elif status == 429:
            due = self.crowded and error["code"] in ("queue_full", "quota")
        elif status == 408 and error["code"] == "slow_body":
            due = client.slow > SETTINGS.body_seconds or self._during(self.jumps, client)
        elif status == 408:
            due = timed
        else:
            due = status == 500 and bool(self.faults) and "the engine failed" in text
            of_run = client.question is not None and client.question.path == RUNS
            lost = died > 0 or self._during(self.jumps, client)
            due |= of_run and lost and status in (400, 404) and "run" in text
        _require(due, client, f"an error without a cause: {status} {error}")
        if status in (429, 503) and client.headers and not client.streams:
            after = client.headers.get("retry-after", "")
            known = after.isdigit() and 1 <= int(after) <= 60
            _require(known, client, f"nobody said when to come again: {after!r}")

    def _during(self, moments: list[float], client: Client) -> bool:
        return any(client.began - 30 <= at <= client.ended for at in moments)

    def _require_stream(self, client: Client, *, ends: bool) -> str:
        """Refuse a stream that is not the answer, or with `ends` has not ended as it should."""
        text = client.told.decode()
        events = [one.split("\n")[-1] for one in text.split("\n\n") if one.split("\n")[-1]]
        events = [one.removeprefix("data: ") for one in events if one.startswith("data: ")]
        done = events.count("[DONE]")
        _require(done == 0 or (done == 1 and events[-1] == "[DONE]"), client, "[DONE] is not last")
        chunks = [json.loads(one) for one in events if one != "[DONE]"]
        errors = [one["error"] for one in chunks if one.get("error")]
        if errors:
            _require(done == 0 and "error" in chunks[-1], client, "something follows an error")
            _require(len(errors) == 1, client, "two errors")
            status = 500 if "the engine failed" in errors[0]["message"] else 503
            self._require_reason(client, status, errors[0])
        elif ends:
            _require(done == 1, client, "a stream ends in silence")
        choices: dict[int, dict[str, Any]] = {}
        for one in (choice for chunk in chunks for choice in chunk.get("choices", ())):
            own = choices.setdefault(one["index"], {"text": "", "token_ids": []})
            _require("finish_reason" not in own, client, "something follows an end")
            own["text"] += one.get("text") or one.get("delta", {}).get("content") or ""
            own["token_ids"] += one.get("token_ids") or []
            if one.get("finish_reason") is not None:
                own |= {"finish_reason": one["finish_reason"], "index": one["index"]}
                own["stop_reason"] = one.get("stop_reason")
        if errors or not done:
            self._require_beginnings(client, choices)
            return "error in a stream"
        self._require_choices(client, [choices[index] for index in sorted(choices)])
        return "streamed"

    def _require_beginnings(self, client: Client, choices: dict[int, dict[str, Any]]) -> None:
        if client.question is not None:
            for index, own in choices.items():
                wanted = client.question.texts[index]
                _require(wanted.startswith(own["text"]), client, f"{own} is not of {wanted!r}")

    def _require_answer(self, client: Client, body: dict[str, Any]) -> None:
        """Refuse an answer that is not the library's."""
        question = client.question
        if question is None or question.generates:
            for one in body["choices"]:
                one.setdefault("text", one.get("message", {}).get("content"))
            self._require_choices(client, body["choices"])
        elif question.path == RUNS:
            (own,) = body["results"]
            said = own["text"], tuple(own["tokens"])
            meant = question.texts[0], question.tokens[0]
            _require(said == meant, client, f"{said} in place of {meant}")
        else:
            names = ("tokens", "logprobs") if question.path == SCORE else ("embedding",)
            found = [tuple(one[name] for name in names) for one in body["data"]]
            wanted = question.data if question.path == SCORE else [(one,) for one in question.data]
            _require(found == [*wanted], client, "other numbers than the library's")

    def _require_choices(self, client: Client, choices: list[dict[str, Any]]) -> None:
        """Refuse choices that are not the library's; a deadline may cut them, and nothing else."""
        question = client.question
        if question is None:
            raise Wrong(f"{client.number}: what has no end has ended")
        _require(len(choices) == len(question.texts), client, "another number of choices")
        for index, own in enumerate(choices):
            ids, wanted = tuple(own["token_ids"]), question.tokens[index]
            if own["stop_reason"] == "time":
                _require("timeout" in client.body, client, "no deadline was asked for")
                _require(wanted[: len(ids)] == ids, client, f"{ids} is not of {wanted}")
                continue
            said = (own["index"], own["text"], own["finish_reason"])
            meant = (index, question.texts[index], question.ends[index])
            _require(said == meant, client, f"{said} in place of {meant}")
            _require(not ids or ids == wanted, client, f"{ids} in place of {wanted}")

    async def _require_nothing_left(self) -> None:
        """Refuse anything that is left of requests when nobody asks any more."""
        await self.link.wait_ready(100.0)
        # Some steps, for what was left in the middle of one, and until runs are found left alone.
        await asyncio.sleep(2.0 + 1.2 * IDLE)
        link, host, hosted = self.link, self.mooring.host, self.mooring.hosted
        assert host is not None and hosted is not None
        left: dict[str, Any] = {
            "open exchanges": self.front.open,
            "asks": len(link._asking),
            "asks of the engine": len(host._under),
            "asks of runs": len(host._running) + len(host._rooms),
            "open runs": len(host._runs._runs),
            "scores": len(host._left),
            "requests of keys": +link.book._requests,
            "rows of keys": {k: v for k, v in link.book._rows.items() if v},
        }
        lines: list[WaitingLine] = [*link._lines.values()]
        for line in lines:
            left |= {"in line": len(line), "begun": len(line._begun), "charged": len(line._charged)}
            left["flows"] = len([one for one in line._heaps.values() if len(one) > 1000])
        for number, driver in enumerate(hosted.desk._threads):
            engine, executor = driver.engine, cast(HashExecutor, driver.engine.executor)
            audit(engine)
            kept = {one.row for one in engine.prefixes.kept}
            left |= {
                f"groups of engine {number}": len(engine.scheduler.groups),
                f"rows of engine {number}": engine.ledger.held ^ kept,
                f"rows of executor {number}": set(executor.rows) ^ kept,
                f"boxes of driver {number}": len(driver._boxes) + len(driver._line),
            }
        tasks = [one for one in asyncio.all_tasks() if one not in self._own_tasks()]
        left["tasks"] = [one.get_coro().__qualname__ for one in tasks]  # type: ignore[union-attr]
        over = {name: one for name, one in left.items() if one}
        if over:
            raise Wrong(f"left behind: {over}")

    def _own_tasks(self) -> set[Any]:
        """The tasks of a server that nobody asks: the keeper of the engine, the engine's, ours."""
        named = (
            "wait_for",
            "_keep",
            "live",
            "_tell",
            "_beat",
            "_live",
            "_trouble",
            "_watch",
            "_sweep",
            "carry_out",
        )
        return {
            one for one in asyncio.all_tasks() if getattr(one.get_coro(), "__name__", "") in named
        }


def _require(holds: bool, client: Client, text: str) -> None:
    if not holds:
        raise Wrong(f"request {client.number} ({client.body}): {text}; told {bytes(client.told)!r}")
