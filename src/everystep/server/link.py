"""The front's side: one connection to an engine, which may die and is started again.

An ask lives until it is over, whatever happens to the engine: its draws are keyed by a seed, so it
is asked again of the next engine, and what was told already is left out. An ask that two engines
died with is given up, since it may be why.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from everystep.errors import CapacityError, EverystepError, FormatError
from everystep.server.host import BEAT, EngineLimits, HostedModel, Loader, serve_connection
from everystep.server.line import LinePlace, WaitingLine
from everystep.server.messages import (
    OF_ENGINE,
    WINDOW,
    Alive,
    Ask,
    Begun,
    Bring,
    Failed,
    FrontMessage,
    HearAsk,
    HeardText,
    Leave,
    ModelFacts,
    Over,
    PutAway,
    Quit,
    Ready,
    ReplicaRoom,
    ReplicaState,
    RowNews,
    RunAsk,
    RunNews,
    RunOver,
    ScoreAsk,
    ScoredTexts,
    Stands,
    Taken,
    Tokens,
    frame,
    read_frame,
)
from everystep.server.presence import IdleLimits, Presence
from everystep.server.quotas import QuotaBook
from everystep.server.tallies import Tallies

log = logging.getLogger("everystep.server")

HANG_SECONDS = 120.0
"""Seconds of silence, or in one step, after which an engine is taken to hang."""
_FATAL = 2
"""Deaths of an engine after which an ask that was under way is given up."""
_LONGEST_PAUSE = 10.0
_STOPPED = "the server has been stopped"
News = RowNews | Begun | Over | ScoredTexts | HeardText | RunNews | RunOver | Failed
_LAST = (Over, ScoredTexts, HeardText, RunOver, Failed)
AnyAsk = Ask | ScoreAsk | HearAsk | RunAsk


class EngineGone(EverystepError, RuntimeError):
    """The engine has died, or is not there yet."""


class Mooring(Protocol):
    """A place where an engine is started: in a process of its own, or in a thread."""

    @abstractmethod
    def start(self) -> socket.socket:
        """Start an engine and return this end of its connection."""

    @abstractmethod
    def end(self) -> None:
        """End the engine, if it has not ended by itself; return when it has."""

    @abstractmethod
    def kill(self) -> None:
        """End an engine that answers nothing, whatever it does, as far as that can be."""


class ProcessMooring(Mooring):
    """An engine in a process of its own, which inherits its end of a socketpair.

    `program`: the module that is run, with the number of the socket and its orders as JSON.
    `patience`: the seconds that it has for ending.
    """

    def __init__(
        self,
        orders: msgspec.Struct,
        program: str = "everystep.server.engine_process",
        patience: float = 10.0,
    ) -> None:
        self._orders, self._program, self._patience = orders, program, patience
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process, None before the first."""
        return None if self._process is None else self._process.pid

    def start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            orders = msgspec.json.encode(self._orders).decode()
            command = [sys.executable, "-m", self._program]
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), orders],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        return ours

    def end(self) -> None:
        if (process := self._process) is None:
            return
        try:
            process.wait(self._patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class ThreadMooring(Mooring):
    """An engine in a thread of this process, for tests and notebooks: the same messages.

    `loader`: loads a model that was put away; without one none is.
    """

    def __init__(
        self,
        models: Callable[[], dict[str, HostedModel]],
        limits: EngineLimits,
        loader: Loader | None = None,
    ) -> None:
        self._models, self._limits, self._loader = models, limits, loader
        self._thread: threading.Thread | None = None
        self._killed: threading.Thread | None = None

    def start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        arguments = theirs, self._models(), self._limits, self._loader
        self._thread = threading.Thread(
            target=serve_connection, args=arguments, name="everystep host", daemon=True
        )
        self._thread.start()
        return ours

    def end(self) -> None:
        if self._thread is not None:
            self._thread.join(None if self._killed is not self._thread else 1.0)

    def kill(self) -> None:
        self._killed = self._thread  # no thread can be ended: it is left where it hangs


class HangWatch:
    """The time for which an engine has said nothing, or has been in the same step.

    Time is counted as it is seen to pass, so that the sleep of a whole machine is nobody's hanging.
    `most`: seconds after which it hangs, 0 for never.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._silent = 0.0
        self._steps: dict[int, tuple[int, float]] = {}

    def hear(self, message: object) -> None:
        """Note that the engine has said something."""
        self._silent = 0.0
        if isinstance(message, Alive):
            before, self._steps = self._steps, {}  # threads of a model that was put away are gone
            for thread, step in enumerate(message.steps):
                known, seconds = before.get(thread, (-1, 0.0))
                self._steps[thread] = step, seconds if step == known >= 0 else 0.0

    def passes(self, seconds: float) -> str | None:
        """Return why the engine is taken to hang after so many seconds more, None while it is not.
        Many at once are this process's own sleep."""
        seconds = min(seconds, 2 * BEAT)
        self._silent += seconds
        longest = 0.0
        for thread, (step, so_far) in self._steps.items():
            if step >= 0:
                self._steps[thread] = step, so_far + seconds
                longest = max(longest, so_far + seconds)
        if self._most and self._silent >= self._most:
            return f"it has said nothing for {self._silent:.0f} s"
        if self._most and longest >= self._most:
            return f"it has been in one step for {longest:.0f} s"
        return None


@dataclass(slots=True)
class Asking:
    """An ask under way, as the front sees it: what has come of it and was not taken.

    `told`: how many tokens of each sequence the reader was given; a further engine's first so many
    are left out. `taken`: events of which the engine does not know yet that they were taken.
    """

    ask: AnyAsk
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    waiting: bool = True
    deaths: int = 0
    told: Counter[int] = field(default_factory=Counter)
    seen: Counter[int] = field(default_factory=Counter)
    since: float = 0.0
    sent: bool = False
    line: WaitingLine | None = None
    steps: int = 0
    taken: int = 0

    @property
    def made(self) -> int:
        """The number of tokens, or of steps of a run, that were told."""
        return sum(self.told.values()) + self.steps

    @property
    def size(self) -> int:
        """The number of its prompt's ids."""
        ask = self.ask
        if isinstance(ask, RunAsk | HearAsk):
            return 0
        return len(ask.prompt) if isinstance(ask, Ask) else sum(map(len, ask.rows))

    def is_new(self, message: News) -> bool:
        """Count a message; return False where an earlier engine's was the same."""
        if isinstance(message, RowNews) and not message.fails:
            self.seen[message.index] += 1
            if self.seen[message.index] <= self.told[message.index]:
                return False
            self.told[message.index] += 1
        if isinstance(message, Begun):
            again, self.waiting = not self.waiting, False
            return not again
        self.steps += isinstance(message, RunNews)
        return True

    def tell(self, message: News) -> bool:
        """Hand a message to the reader; return False where an earlier engine's was the same."""
        new = self.is_new(message)
        if new:
            self.news.put_nowait(message)
        return new

    def is_lost(self) -> bool:
        """Note that the engine died; return True if that is the end of the ask: it may be why, or
        another engine would not do the same."""
        self.seen.clear()
        self.deaths += not self.waiting or isinstance(self.ask, RunAsk)
        return self.deaths >= _FATAL or (self.deaths > 0 and not repeats(self.ask))


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Asks, and ids of their prompts, that may wait for the engine."""

    requests: int = 256
    positions: int = 1 << 20


class EngineLink:
    """The engine, as the front knows it.

    `models`: those it has said that it serves, by name, once `ready` is true. `tokens`: how many
    were made until now, as far as they were told. `hang_seconds`: of silence, or in one step, after
    which it is ended as one that hangs; 0 for never. `replicas`: how many share its rows, and
    `replica_deaths`: how many of these have died. `states`: how replicas are, as far as they have
    said it; None where the engine is none of replicas. `presence`: which models are loaded.
    `tallies`: what engines have counted, until the last beat.
    """

    def __init__(
        self,
        mooring: Mooring,
        limits: QueueLimits | None = None,
        book: QuotaBook | None = None,
        *,
        hang_seconds: float = HANG_SECONDS,
        idle: IdleLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mooring, self._limits, self._clock = mooring, limits or QueueLimits(), clock
        self.presence, self.tallies = Presence(idle, clock), Tallies()
        self._hang_seconds = hang_seconds
        self.book = book or QuotaBook()
        self._lines: dict[str, WaitingLine] = {}
        self._asking: dict[int, Asking] = {}
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None  # of an engine that is ready
        self._connection: asyncio.StreamWriter | None = None  # of any
        self._closing = False
        self._ready = asyncio.Event()
        self._was_ready = False
        self._seconds = 1.0  # of an ask, the mean of the last ones
        self.rows = 1
        self.positions: int | None = None
        self.restarts = self.tokens = self.replica_deaths = 0
        self.replicas = 1
        self.states: list[ReplicaState] | None = None
        self.process: int | None = None
        self.models: dict[str, ModelFacts] = {}

    @property
    def ready(self) -> bool:
        """True while an engine takes asks."""
        return self._ready.is_set()

    @property
    def running(self) -> int:
        """The number of asks that have begun."""
        return sum(not one.waiting for one in list(self._asking.values()))

    @property
    def waiting(self) -> int:
        """The number of asks that have not begun."""
        return sum(one.waiting for one in list(self._asking.values()))

    def load(self) -> dict[str, tuple[int, int]]:
        """Return how many asks have begun, and how many have not, by model."""
        found = {name: [0, 0] for name in self.models}
        for one in self._asking.values():
            if one.ask.model in found:
                found[one.ask.model][one.waiting] += 1
        return {name: (running, waiting) for name, (running, waiting) in found.items()}

    def pause(self) -> int:
        """Return after how many seconds a place in the line is likely to be free."""
        return max(1, min(60, round(self._seconds * (1 + self.waiting) / self.rows)))

    async def start(self) -> None:
        """Start the engine, and keep one running from now on; return when it is ready.

        EngineGone if it ends before that.
        """
        self._keeping = asyncio.create_task(self._keep())
        waiting = asyncio.create_task(self._ready.wait())
        await asyncio.wait((self._keeping, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not self.ready:
            waiting.cancel()
            await self.close()
            raise EngineGone("the engine did not start", do="Its own error is above")

    async def wait_ready(self, seconds: float) -> bool:
        """Return whether the engine is ready, within so many seconds."""
        try:
            await asyncio.wait_for(self._ready.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def give_up(self) -> None:
        """Fail what is under way, since the server ends."""
        self._fail_all(_STOPPED, always=True)

    async def close(self) -> None:
        """End the engine; what is under way fails."""
        self._closing = True
        if self._writer is not None:
            self._writer.write(frame(Quit()))
        if self._connection is not None:
            self._connection.close()  # an engine that is not ready yet reads nothing
        await asyncio.gather(self._keeping, return_exceptions=True)
        self._fail_all(_STOPPED, always=True)

    # --- asks -------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a number that no ask has."""
        self._number += 1
        return self._number

    def require_room(self, positions: int, more: int = 1) -> None:
        """Raise CapacityError if so many more asks, of so many ids, are too many to wait."""
        waiting = sum(line.asked for line in self._lines.values())
        line = sum(line.positions for line in self._lines.values())
        if waiting + more > self._limits.requests and waiting:
            wanted = f"at most {self._limits.requests}"
            raise CapacityError("too many requests wait", wanted=wanted, got=waiting + more)
        if line + positions > self._limits.positions and waiting:
            wanted = f"at most {self._limits.positions} tokens"
            raise CapacityError("too many prompts wait", wanted=wanted, got=line + positions)

    async def follow(
        self, ask: AnyAsk, place: LinePlace | None = None
    ) -> AsyncGenerator[News, None]:
        """Yield what becomes of an ask, `Over`, `ScoredTexts`, `HeardText`,
        `RunOver` or `Failed` last.

        It waits in line, at its place; what is done to a run and has none waits for nobody. Leaving
        the iterator ends the ask.
        """
        one = self._asking[ask.id] = Asking(ask, since=self._clock())
        try:
            place = place or _usual_place(ask, one.size)
            if place is None:
                self._begin(one)
            else:
                one.line = self._line_of(ask.model)
                one.line.enter(ask.id, place)
                self._advance(ask.model)
            while True:
                message = await one.news.get()
                yield message
                if isinstance(message, RowNews | RunNews):
                    self._take_note(one)
                if isinstance(message, Over | ScoredTexts | HeardText | RunOver | Failed):
                    return
        finally:
            if self._asking.pop(ask.id, None) is not None:
                if one.sent:
                    self._send(Leave(ask.id))
                self._leave_line(one, one.made)

    def _take_note(self, one: Asking) -> None:
        """Note that an event was taken, and tell the engine now and then: it sends only so many
        more."""
        one.taken += 1
        if one.taken >= max(1, WINDOW // 4):
            self._send(Taken(one.ask.id, one.taken))
            one.taken = 0

    def _line_of(self, model: str) -> WaitingLine:
        """Return the line of a model."""
        if (line := self._lines.get(model)) is None:
            line = self._lines[model] = WaitingLine(self.book, self._clock)
        return line

    def _advance(self, model: str) -> None:
        """Let those begin whose turn it is, where an engine is there and has the model loaded."""
        line = self._lines.get(model)
        if self._writer is None or line is None:
            return
        if not self.presence.is_loaded(model):
            if len(line) and self.presence.calls_for(model):
                self._send(Bring(model))
            return
        for number in line.begin(self.rows):
            self._begin(self._asking[number])

    def _begin(self, one: Asking) -> None:
        """Hand an ask to the engine."""
        one.sent = True
        if not isinstance(one.ask, Ask):  # which says itself when it has begun
            one.waiting = False
        self._send(one.ask)

    def _leave_line(self, one: Asking, made: int) -> None:
        """Give up an ask's place, after so many tokens; others may begin then."""
        if one.line is not None:
            one.line.leave(one.ask.id, made)
            self._advance(one.ask.model)

    def _send(self, message: FrontMessage) -> None:
        """Write a message where an engine is there; asks are sent to the next one otherwise."""
        if self._writer is not None:
            self._writer.write(frame(message))

    # --- the engine -------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Keep an engine running; one that never was ready is not started again."""
        pause = 0.1
        while not self._closing:
            started = self._clock()
            connection = await asyncio.to_thread(self._mooring.start)
            reader, writer = await asyncio.open_connection(sock=connection)
            self._connection = writer
            try:
                if not self._closing:
                    await self._converse(reader, writer)
            except (msgspec.DecodeError, FormatError) as error:
                log.error("the engine said what cannot be read: %s", error)
            finally:
                self._ready.clear()
                self._writer = self._connection = None
                self.tallies.forget_engine()
                writer.close()
                await asyncio.to_thread(self._mooring.end)
            if self._closing or not self._was_ready:
                return
            self.restarts += 1
            log.error("the engine has died; it is started again")
            self._give_up_fatal()
            lived = self._clock() - started
            pause = 0.1 if lived > 30 else min(pause * 2, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        watch = HangWatch(self._hang_seconds)
        watching: asyncio.Task[None] | None = None
        try:
            while (body := await read_frame(reader)) is not None:
                message = OF_ENGINE.decode(body)
                watch.hear(message)
                if isinstance(message, Ready):
                    self._meet(message, writer)
                    watching = asyncio.create_task(self._watch(watch, writer))
                elif isinstance(message, ReplicaRoom):
                    self._make_room(message)
                elif isinstance(message, Stands):
                    self._take_stand(message)
                elif isinstance(message, Alive):
                    self.tallies.hear(message.tallies)
                else:
                    self._hand_on(message)
        finally:
            if watching is not None:
                watching.cancel()

    async def _watch(self, watch: HangWatch, writer: asyncio.StreamWriter) -> None:
        """End the engine when it hangs, which is another way to die."""
        while True:
            since = self._clock()
            await asyncio.sleep(BEAT)
            self._look_after_models()
            if (why := watch.passes(self._clock() - since)) is not None:
                log.error("the engine hangs and is ended: %s", why)
                self._ready.clear()
                self._mooring.kill()
                writer.transport.abort()
                return

    def _meet(self, message: Ready, writer: asyncio.StreamWriter) -> None:
        """Take a new engine, and ask it what the last one had not ended."""
        self.models = {one.name: one for one in message.models}
        self.rows, self.process, self._writer = message.rows, message.process, writer
        self.positions = message.positions
        self.presence.meet(self.models)
        for one in self._asking.values():
            one.seen.clear()
            one.taken = 0
            if one.sent:
                self._send(one.ask)
        for model in self._lines:
            self._advance(model)
        self._was_ready = True
        self._ready.set()

    # --- models that nobody asks for --------------------------------------------------------------

    def _look_after_models(self) -> None:
        """Have models put away that nobody asks for, and let nobody wait too long for one."""
        for model in self.presence.idle({one.ask.model for one in self._asking.values()}):
            self._send(PutAway(model))
        late = self._clock() - self.presence.limits.load_seconds
        self._fail_waiting(lambda one: one.since < late, "the model takes too long to load")

    def _take_stand(self, message: Stands) -> None:
        """Take note that a model is loaded, or is not, and go on with those who wait for it."""
        if (text := message.error) is not None:
            self._fail_waiting(lambda one: one.ask.model == message.model, text)
        self.presence.told(message.model, loaded=message.facts is not None)
        if message.facts is not None:
            self.models[message.model] = message.facts
        self._advance(message.model)

    def _fail_waiting(self, fails: Callable[[Asking], bool], text: str) -> None:
        """Fail those who wait for a model to be loaded, if they are such."""
        for id, one in list(self._asking.items()):
            if not one.sent and not self.presence.is_loaded(one.ask.model) and fails(one):
                self._fail(id, one, text)

    def _fail(self, id: int, one: Asking, text: str) -> None:
        del self._asking[id]
        if one.sent:  # of an engine that is still there, nobody waits for it
            self._send(Leave(id))
        self._leave_line(one, one.made)
        one.tell(Failed(id, 503, text))

    def _make_room(self, message: ReplicaRoom) -> None:
        """Let as many begin as there is room for now."""
        self.rows, self.replicas = message.rows, message.replicas
        self.replica_deaths, self.states = message.deaths, message.states
        for model in self._lines:
            self._advance(model)

    def _hand_on(self, message: Tokens | News) -> None:
        if isinstance(message, Tokens):
            for row in message.rows:
                if (one := self._asking.get(row.id)) is None:
                    continue
                if one.tell(row):
                    self.tokens += row.token >= 0
                else:  # an earlier engine's was the same, and was taken
                    self._take_note(one)
            return
        if (one := self._asking.get(message.id)) is None:
            return
        if isinstance(message, _LAST):
            del self._asking[message.id]
            if not isinstance(one.ask, RunAsk):
                self._seconds += 0.1 * (self._clock() - one.since - self._seconds)
            made = _made(message, one)
            if not (isinstance(one.ask, Ask) and one.ask.streams):  # of others tokens were told
                self.tokens += made
            self._leave_line(one, made)
        one.tell(message)

    def _give_up_fatal(self) -> None:
        """Fail what several engines died with, and what cannot be done again alike."""
        self._fail_all("the engine died while it worked on this", always=False)

    def _fail_all(self, text: str, *, always: bool) -> None:
        for id, one in list(self._asking.items()):
            if always or one.is_lost():
                self._fail(id, one, text)


def _usual_place(ask: AnyAsk, size: int) -> LinePlace | None:
    """Return the place in line of an ask that was given none; None for what is done to a run."""
    if isinstance(ask, RunAsk):
        return None
    if isinstance(ask, Ask):
        return LinePlace(positions=size)
    return LinePlace(positions=size, lane="score" if isinstance(ask, ScoreAsk) else "hear")


def _made(message: News, one: Asking) -> int:
    """Return how many tokens came of an ask whose last message this is."""
    match message:
        case Over():
            return sum(len(result.tokens) for result in message.results)
        case HeardText():
            return sum(len(part.tokens) for part in message.parts)
        case RunOver():
            return message.made
        case _:
            return one.made


def repeats(ask: AnyAsk) -> bool:
    """Return whether an ask gives the same when it is asked again: its draws are keyed by a seed,
    and no clock ends it. What is done to a run is lost with it."""
    if isinstance(ask, RunAsk):
        return False
    if isinstance(ask, ScoreAsk | HearAsk):
        return True
    timed = any(ask.keywords.get(name) is not None for name in ("timeout", "max_time"))
    return not timed and ask.keywords.get("seed") is not None


__all__ = ["EngineGone", "EngineLink", "ProcessMooring", "ThreadMooring"]
