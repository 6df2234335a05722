"""The engine's side: asks of the front come in, and what becomes of them goes out.

One loop reads the socket and writes to it; asks are read by the threads of a `Desk`, and stepped by
those of its drivers. Nothing that an ask brings is looked at in a thread that steps.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

import msgspec
import numpy as np
import torch
from torch import Tensor

from everystep.adapters import read_steering, steered_size
from everystep.api.model import LanguageModel
from everystep.api.score import Score
from everystep.api.score import score as score_texts
from everystep.api.transcribe import transcribe, usual_extractor
from everystep.drivers.driver import Driver
from everystep.drivers.engine_thread import Desk, Submission
from everystep.drivers.generated import Generated
from everystep.drivers.session import KEPT, Session
from everystep.engine import Continuous, Reuse
from everystep.errors import (
    CapacityError,
    EverystepError,
    OversizeError,
    RequestError,
    TokenizerError,
    UnsupportedError,
)
from everystep.images import PictureTokenizer
from everystep.memory import give_back
from everystep.outputs import TokenLogprobs
from everystep.processors.grammars.source import KINDS
from everystep.processors.grammars.trials import GrammarTrials
from everystep.processors.grammars.vocabulary import prepare_vocabulary
from everystep.requests.options import Options
from everystep.requests.prompts import PromptLike
from everystep.server.hosted_runs import HostedRuns
from everystep.server.messages import (
    WINDOW,
    Alive,
    Ask,
    Begun,
    Bring,
    Ended,
    EngineTally,
    Failed,
    FrontMessage,
    HearAsk,
    HeardPart,
    HeardText,
    Leave,
    Likelihoods,
    ModelFacts,
    Over,
    PutAway,
    Ready,
    RowNews,
    RunAsk,
    RunNews,
    ScoreAsk,
    ScoredTexts,
    Stands,
    Taken,
    ToEngine,
    ToFront,
    Tokens,
    frame,
    front_messages,
)
from everystep.server.pictures import patches_of
from everystep.server.pooling import Pooling, vector_of
from everystep.server.wire_keywords import Vectors, as_keywords, unpacked_steering
from everystep.sounds.features import WhisperFeatureExtractor
from everystep.stops.ends import moment
from everystep.text import Tokenizer
from everystep.types import Event, FinishReason

log = logging.getLogger("everystep.server")

BEAT = 0.5
"""Seconds after which the front is told again that the process runs."""
_COMPILED = (*KINDS, "tools")
"""Keywords of which grammars are made, which takes time."""
_SCORED_AT_ONCE = 32
"""Rows that are scored before it is looked whether anybody still waits for them."""
_EVENTS = 256
"""Events that may wait to be sent before a prompt is set aside."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Rows that are in use at once, and positions that a step feeds."""

    max_rows: int = 32
    token_budget: int = 1024
    max_positions: int | None = None


class HostedModel:
    """A model of the engine with its tokenizer, and the desk where its prompts are handed in.

    `extractor`: what makes features of sounds, for a model that listens; that of its size without.
    `trials`: where grammars are compiled first, its own without. `steering`: vectors by layer that
    requests may ask for by name; RequestError where they do not fit.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        extractor: WhisperFeatureExtractor | None = None,
        trials: GrammarTrials | None = None,
        steering: Mapping[str, Vectors] | None = None,
    ) -> None:
        def scheduler() -> Continuous:
            own = limits.token_budget, limits.max_rows, limits.max_positions
            return Continuous(*own, reuse=Reuse(KEPT))

        self.model, self.tokenizer = model, tokenizer
        self.extractor = (extractor or usual_extractor(model)) if model.listens else None
        self.steering = dict(steering or {})
        # Held, so that all who ask for them share rows and the packed copy.
        self._steers = [read_steering(model.core, one) for one in self.steering.values()]
        self.session = Session(
            model, tokenizer, (), None, None, {}, gives_events=True, scheduler=scheduler
        )
        prepare_vocabulary(tokenizer, model.vocab_size)  # while nobody waits for a token yet
        self.trials, self._owned = trials or GrammarTrials(), trials is None
        self.desk = Desk(self.session, None, self.trials)  # the front bounds how many wait

    def tally(self) -> EngineTally:
        """Return what its engines have counted, and how much of what they may use is in use."""
        drivers = self.desk.drivers
        counts = [one.engine.counts for one in drivers]
        return EngineTally(
            sum(one.preemptions for one in counts),
            sum(one.drafted for one in counts),
            sum(one.accepted for one in counts),
            max(map(_usage, drivers), default=0.0),
        )

    def close(self) -> None:
        """Take no more prompts and end those inside; return when no thread steps any more."""
        self.desk.join()
        if self._owned:
            self.trials.close()

    def facts(self, name: str) -> ModelFacts:
        """Return what the front needs to know of the model."""
        ends = self.model.generation_config.eos_token_id
        listed = [] if ends is None else [ends] if isinstance(ends, int) else [*ends]
        return ModelFacts(
            name,
            list(self.model.adapters),
            listed,
            self.model.reach,
            self.model.vocab_size,
            self.model.runs_on,
            isinstance(self.tokenizer, PictureTokenizer),
            None if self.extractor is None else self.extractor.sampling_rate,
            *steered_size(self.model.core),
            [*self.steering],
        )


def _usage(driver: Driver) -> float:
    """Return the part of an engine's rows, or bounded positions, that prompts have."""
    scheduler = driver.engine.scheduler
    if not isinstance(scheduler, Continuous) or (left := scheduler.planned) is None:
        return 0.0
    if not (scheduler.running or scheduler.aside):
        return 0.0  # what was planned last has ended
    if (most := scheduler.max_positions) is not None:
        return 1.0 - left.positions / most
    return 1.0 - left.rows / scheduler.max_rows


@dataclass(slots=True)
class _Under:
    """An ask under way: what was handed in, and how much of it has been told. `room`: how many
    further events its reader may be sent."""

    ask: Ask
    one: Submission
    begun: bool = False
    room: int = field(default_factory=lambda: WINDOW)

    @property
    def holds_back(self) -> bool:
        """True while there are events that the reader has no room for."""
        return self.ask.streams and self.one.box is not None and bool(self.one.box.events)


Loader = Callable[[str], HostedModel]
"""Loads a model, by its name."""


class EngineHost:
    """The server of one connection to a front, until it closes.

    `models`: the host's own from now on, as it lets go of those that are put away. `loader`: loads
    these again; without one none is put away.
    """

    def __init__(
        self, models: dict[str, HostedModel], limits: EngineLimits, loader: Loader | None = None
    ) -> None:
        self._models, self._limits, self._loader = models, limits, loader
        self._under: dict[int, _Under] = {}
        self._noticed = asyncio.Event()
        self._scoring = ThreadPoolExecutor(1, "everystep scores")
        known = {name: (one.model, one.tokenizer) for name, one in models.items()}
        steering = {name: one.steering for name, one in models.items()}
        self._runs = HostedRuns(known, next(iter(models.values())).trials, steering)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._rooms: dict[int, asyncio.Semaphore] = {}  # for the news of runs
        self._seeing = ThreadPoolExecutor(1, "everystep cuts pictures")
        self._seen: dict[int, asyncio.Task[None]] = {}
        self._hearing = ThreadPoolExecutor(1, "everystep hears")
        self._left: dict[int, threading.Event] = {}  # of scores and sounds, set where nobody waits
        self._shelving = asyncio.Lock()  # around putting away and loading
        self._shelved: set[asyncio.Task[None]] = set()

    async def serve(self, connection: socket.socket) -> None:
        """Answer asks until the front says so, or is gone; nothing is left inside then."""
        self._loop = asyncio.get_running_loop()
        reader, self._writer = await asyncio.open_connection(sock=connection)
        facts = [one.facts(name) for name, one in self._models.items()]
        limits = self._limits
        self._send(Ready(facts, limits.max_rows, os.getpid(), limits.max_positions))
        telling = asyncio.create_task(self._tell())
        telling.add_done_callback(lambda _: self._writer.close())  # a defect ends the connection
        beating = asyncio.create_task(self._beat())
        try:
            async with aclosing(front_messages(reader)) as messages:
                async for message in messages:
                    self._take(message)
        finally:
            telling.cancel()
            beating.cancel()
            for under in self._under.values():
                under.one.leave()
            for left in self._left.values():
                left.set()
            for pool in (self._scoring, self._seeing, self._hearing):
                pool.shutdown(wait=False, cancel_futures=True)
            for task in (*self._running.values(), *self._seen.values()):
                task.cancel()
            await asyncio.gather(*self._shelved, return_exceptions=True)  # a thread is in there
            await asyncio.to_thread(self._runs.close)
            await asyncio.gather(*(asyncio.to_thread(m.close) for m in self._models.values()))
            self._writer.close()

    # --- in ---------------------------------------------------------------------------------------

    def _take(self, message: FrontMessage) -> None:
        match message:
            case PutAway():
                self._shelve(self._put_away(message.model))
            case Bring():
                self._shelve(self._bring(message.model))
            case Ask() | ScoreAsk() | HearAsk() | RunAsk() if self._is_away(message.model):
                self._send(Failed(message.id, 503, "the model has been put away"))
            case Ask() if message.pictures:
                self._begin(self._seen, message.id, self._see(message))
            case Ask():
                self._submit(message, message.prompt)
            case ScoreAsk():
                self._left[message.id] = threading.Event()
                self._loop.run_in_executor(self._scoring, self._score, message)
            case HearAsk():
                self._left[message.id] = threading.Event()
                self._loop.run_in_executor(self._hearing, self._hear, message)
            case RunAsk():
                self._begin(self._running, message.id, self._carry_out(message))
            case Taken():
                self._make_room(message)
            case Leave():
                if (left := self._left.get(message.id)) is not None:
                    left.set()
                for tasks in (self._running, self._seen):
                    if (task := tasks.get(message.id)) is not None:
                        task.cancel()
                if (under := self._under.pop(message.id, None)) is not None:
                    under.one.leave()
            case _:
                assert_never(message)

    def _begin(
        self, tasks: dict[int, asyncio.Task[None]], id: int, work: Coroutine[Any, Any, None]
    ) -> None:
        """Begin what an ask wants, and forget the task when it is over: one that is cancelled
        before it has begun runs no line of its own."""
        task = tasks[id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: tasks.pop(id, None))

    def _make_room(self, message: Taken) -> None:
        """Go on telling a reader who has taken what he was told."""
        if (under := self._under.get(message.id)) is not None:
            under.room += message.count
            self._noticed.set()
        if (room := self._rooms.get(message.id)) is not None:
            for _ in range(min(message.count, WINDOW)):
                room.release()

    async def _see(self, ask: Ask) -> None:
        """Cut the pictures of an ask into patches, in a thread, and hand it in."""
        try:
            own = ask.pictures, self._models[ask.model].tokenizer
            found = await self._loop.run_in_executor(self._seeing, patches_of, *own)
        except Exception as error:
            self._send(failed(ask.id, error))
            return
        self._submit(ask, {"input_ids": ask.prompt, **found})

    def _submit(self, ask: Ask, prompt: PromptLike) -> None:
        hosted, since = self._models[ask.model], moment()

        def options() -> Options:
            keywords = as_keywords(ask.keywords, hosted.steering)
            if ask.pools is not None:
                keywords["strategy"] = _pooling(ask.pools, hosted.model)
            elif ask.record is not None:
                keywords["record"] = ask.record.writer()
            return hosted.session.asked(prompt, keywords, since, in_chat=ask.in_chat)

        def notice() -> None:
            try:
                self._loop.call_soon_threadsafe(self._noticed.set)
            except RuntimeError:  # the loop has ended, and with it everybody who listened
                return

        most = _EVENTS if ask.streams else None
        try:
            long = any(ask.keywords.get(name) is not None for name in _COMPILED)
            one = hosted.desk.submit(prompt, options, notice, most, long=long, owner=ask.owner)
        except Exception as error:
            self._send(failed(ask.id, error))
            return
        self._under[ask.id] = _Under(ask, one)
        self._noticed.set()

    def _score(self, ask: ScoreAsk) -> None:
        """Score rows, in a thread of its own, some after some until nobody waits for them."""
        hosted, left = self._models[ask.model], self._left[ask.id]
        message: ToFront | None = None
        scores: list[Score] = []
        try:
            steer = unpacked_steering(ask.steer, hosted.steering)
            for start in range(0, len(ask.rows), _SCORED_AT_ONCE):
                if left.is_set():
                    break
                scores += score_texts(
                    hosted.model,
                    hosted.tokenizer,
                    ask.rows[start : start + _SCORED_AT_ONCE],
                    after=ask.after,
                    best=ask.best,
                    adapter_names=ask.adapter,
                    steer=steer,
                )
            message = ScoredTexts(ask.id, [_known_of_score(one) for one in scores])
        except Exception as error:
            message = failed(ask.id, error)
        self._loop.call_soon_threadsafe(self._told, ask.id, message)

    def _hear(self, ask: HearAsk) -> None:
        """Write down a sound, in a thread of its own, until nobody waits for it."""
        left = self._left[ask.id]
        message: ToFront | None = None
        try:
            if not left.is_set():
                message = _transcript(ask, self._models[ask.model], left)
        except Exception as error:
            message = failed(ask.id, error)
        self._loop.call_soon_threadsafe(self._told, ask.id, message)

    def _told(self, id: int, message: ToFront | None) -> None:
        left = self._left.pop(id)
        if message is not None and not left.is_set():
            self._send(message)

    async def _carry_out(self, ask: RunAsk) -> None:
        """Do something to a run, a step at a time, between steps of other runs."""
        room = self._rooms[ask.id] = asyncio.Semaphore(WINDOW)
        try:
            async with aclosing(self._runs.carry_out(ask)) as messages:
                async for message in messages:
                    if isinstance(message, RunNews):
                        await room.acquire()
                    self._send(message)
        except Exception as error:
            self._send(failed(ask.id, error))
        finally:
            self._rooms.pop(ask.id, None)

    async def _explain(self, ask: Ask, over: Over) -> None:
        """Tell the end of an ask with the reasons for each token."""
        try:
            found = await self._runs.explanations(ask, [one.tokens for one in over.results])
        except Exception as error:
            self._send(failed(ask.id, error))
            return
        results = [
            msgspec.structs.replace(one, explanations=why)
            for one, why in zip(over.results, found, strict=True)
        ]
        self._send(msgspec.structs.replace(over, results=results))

    # --- models that nobody asks for --------------------------------------------------------------

    def _is_away(self, model: str) -> bool:
        return model != "" and model not in self._models

    def _shelve(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._shelved.add(task)
        task.add_done_callback(self._shelved.discard)

    async def _put_away(self, name: str) -> None:
        """Let go of a model, unless a run of it is open, or nothing could load it again."""
        async with self._shelving:
            hosted = self._models.get(name)
            if hosted is None or self._loader is None or not self._runs.forget(name):
                facts = None if hosted is None else hosted.facts(name)
                self._send(Stands(name, facts))
                return
            del self._models[name]
            await asyncio.to_thread(hosted.close)
            del hosted  # the last that held it
            await asyncio.to_thread(give_back)
            log.info("the model %s has been put away", name)
            self._send(Stands(name))

    async def _bring(self, name: str) -> None:
        """Load a model that was put away."""
        async with self._shelving:
            error = None
            try:
                if name not in self._models and self._loader is not None:
                    hosted = await asyncio.to_thread(self._loader, name)
                    own = (hosted.model, hosted.tokenizer)
                    self._models[name] = hosted
                    self._runs.know(name, own, hosted.steering)
            except Exception as caught:  # whatever it is, those who wait have to be told
                log.error("the model %s cannot be loaded again", name, exc_info=caught)
                error = "the model cannot be loaded again; the log has more"
            found = self._models.get(name)
            self._send(Stands(name, None if found is None else found.facts(name), error))

    # --- out --------------------------------------------------------------------------------------

    async def _tell(self) -> None:
        """Send what is new, a message for all of it, whenever something is."""
        while True:
            await self._noticed.wait()
            self._noticed.clear()
            for message in self._new():
                self._send(message)
            await self._writer.drain()

    def _new(self) -> list[ToFront]:
        """Return what is new of all asks."""
        rows: list[RowNews] = []
        over: list[ToFront] = []
        for id, under in list(self._under.items()):
            ended = under.one.over  # asked first, since the last event comes before it
            rows += self._news(id, under)
            if ended and not under.holds_back:
                del self._under[id]
                outcome = _outcome(under.ask, under.one)
                if under.ask.rivals is not None and isinstance(outcome, Over):
                    self._begin(self._running, id, self._explain(under.ask, outcome))
                else:
                    over.append(outcome)
        return [Tokens(rows), *over] if rows else over

    async def _beat(self) -> None:
        """Say again and again that the process runs, and which steps it takes."""
        while True:
            await asyncio.sleep(BEAT)
            tallies = {name: one.tally() for name, one in self._models.items()}
            self._send(Alive([-1 if step is None else step for step in self._steps()], tallies))

    def _steps(self) -> list[int | None]:
        """Return the number of the step that each thread takes now, None between two."""
        drivers = [one for hosted in self._models.values() for one in hosted.desk.drivers]
        return [self._runs.step_under_way, *(one.step_under_way for one in drivers)]

    def _news(self, id: int, under: _Under) -> list[RowNews]:
        box = under.one.box
        if box is None or not box.groups:
            return []
        if not under.begun:
            under.begun = True
            notices = under.one.answer().options.effective.notices
            self._send(Begun(id, _strings(under.one), list(notices)))
        rows = []
        while under.ask.streams and box.events and under.room:
            under.room -= 1
            rows.append(_row(id, box.events.popleft()))
        under.one.caught_up()
        return rows

    def _send(self, message: ToFront) -> None:
        self._writer.write(frame(message))


def serve_connection(
    connection: socket.socket,
    models: dict[str, HostedModel],
    limits: EngineLimits,
    loader: Loader | None = None,
) -> None:
    """Answer a front's asks, in the thread that calls this, until it closes."""
    asyncio.run(EngineHost(models, limits, loader).serve(connection))


def _strings(one: Submission) -> list[str]:
    requests = () if one.box is None else one.box.requests
    trim = one.answer().trim(requests[0]) if requests else None
    return [] if trim is None else list(trim[0])


def _row(id: int, event: Event) -> RowNews:
    top = None if event.top_logprobs is None else list(event.top_logprobs)
    if event.finish is None:
        return RowNews(id, event.index, event.token, event.logprob, top)
    kind, matched = _said(event.finish)
    return RowNews(id, event.index, event.token, event.logprob, top, kind, matched)


def _said(reason: FinishReason) -> tuple[str, str | int | None]:
    """Return the kind of an end and what matched, where that is a text or an id."""
    matched = reason.matched
    if reason.kind == "error":
        return "error", str(matched)
    return reason.kind, matched if isinstance(matched, str | int) else None


def _pooling(how: str, model: LanguageModel) -> Pooling:
    """Return the strategy that makes vectors in this way; UnsupportedError for a model that has no
    states of a prompt."""
    if model.is_encoder_decoder:
        what = "vectors are made of the states of a decoder, and this model reads with an encoder"
        raise UnsupportedError(what, do="Ask a model without one")
    return Pooling("last" if how == "last" else "mean")


def _outcome(ask: Ask, one: Submission) -> ToFront:
    """Return what an ask that is over became."""
    id = ask.id
    try:
        group = one.group()
        if group.error is not None:
            raise group.error
        if ask.pools is not None:
            size, why = group.request.prompt.length, group.done[0].reason.kind
            if why == "time":
                return Over(id, [Ended([], why, None, 0.0, size, 0)])
            return Over(id, [Ended([], "stop", None, 0.0, size, 0, vector=vector_of(group))])
        reply = replace(one.answer(), tokenizer=None)  # the front makes the texts
        found = [_ended(*each) for each in enumerate(reply.generated(group))]
        opened, seconds = (0.0, 0.0) if one.box is None else one.box.took
        return Over(id, found, opened, seconds)
    except Exception as error:
        return failed(id, error)


def _ended(number: int, result: Generated) -> Ended:
    """Return a continuation as the front is told of it. What is known of the prompt is the same for
    all, and long: the first one has it."""
    of_prompt = None if number else result.prompt_logprobs
    kind, matched = _said(result.finish_reason)
    return Ended(
        list(result.tokens),
        kind,
        matched,
        float(result.score),
        result.prompt_tokens,
        result.cached_tokens,
        None if result.logprobs is None else _known(result.logprobs),
        None if of_prompt is None else _known(of_prompt, 1),
    )


def _transcript(ask: HearAsk, hosted: HostedModel, left: threading.Event) -> HeardText:
    """Return what is said in a sound; UnsupportedError once nobody waits for it."""

    def criterion(ids: Tensor, *_: object) -> Tensor:
        if left.is_set():
            raise UnsupportedError("nobody waits for the transcript")
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    options: dict[str, Any] = {**ask.keywords, "stopping_criteria": [criterion]}
    if ask.prompt:
        begin = getattr(hosted.model.generation_config, "prev_sot_token_id", None)
        if begin is None:
            what = "this model has no id before what was said"
            raise UnsupportedError(what, do="Leave prompt out")
        options["prompt_ids"] = torch.tensor([begin, *ask.prompt])
    found = transcribe(
        hosted.model,
        hosted.tokenizer,
        np.frombuffer(ask.samples, "<f4"),
        timestamps=ask.timestamps,
        extractor=hosted.extractor,
        **options,
    )
    parts = [HeardPart(one.text, one.start, one.end, [*one.ids]) for one in found.segments]
    return HeardText(ask.id, found.text, found.language, parts)


def _known(found: TokenLogprobs | Score, first: int = 0) -> Likelihoods:
    return Likelihoods(
        found.tokens.tolist(),
        found.logprobs.tolist(),
        found.top_tokens.tolist(),
        found.top_logprobs.tolist(),
        first,
    )


def _known_of_score(found: Score) -> Likelihoods:
    return _known(found)


def failed(id: int, error: Exception) -> Failed:
    """Return what the front is told of an error, with the status that says whose it is.

    The text of an error that is not ours may hold paths and addresses: the log has it alone.
    """
    if not isinstance(error, EverystepError):
        log.error("ask %d failed", id, exc_info=error)
        return Failed(id, 500, "the engine failed at this request; its log has more")
    status = 500
    if isinstance(error, OversizeError | RequestError | TokenizerError):
        status = 400
    elif isinstance(error, CapacityError):
        status = 429
    return Failed(id, status, str(error)[:2000] or type(error).__name__)


__all__ = ["EngineHost", "EngineLimits", "HostedModel", "Loader", "ToEngine", "serve_connection"]
