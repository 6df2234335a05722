"""A server in virtual time: one event loop without sockets, threads or waiting, the same each time.

The clock goes on to the next thing that happens. What the server does in threads happens here some
virtual moments later, in an order that a seed says; so do the bytes between front and engine, which
may come in pieces of any length.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast
from weakref import WeakKeyDictionary

import pytest

from everystep.api.model import LanguageModel
from everystep.drivers import engine_thread
from everystep.drivers.driver import CANCELLED, Driver
from everystep.drivers.engine_thread import EngineThread
from everystep.server import host, link
from everystep.server.host import EngineHost, EngineLimits, HostedModel
from everystep.server.link import Mooring
from everystep.testing import HashExecutor
from everystep.testing.models import tiny_llama
from everystep.text import Tokenizer
from everystep.types import FinishReason, StepOutput, Work
from tests.server.serving import TRIALS

BEGINNING = 1000.0


class Stuck(Exception):
    """Everybody waits, and nothing will ever happen: something was lost."""


class VirtualClock:
    """The time that passes, and a wall clock that may be set to anything."""

    def __init__(self) -> None:
        self.now, self.wall, self._told = BEGINNING, 1.7e9, 0.0

    def __call__(self) -> float:
        self._told = max(self._told + 1e-9, self.now)  # to whoever measures everything takes time
        return self._told


class _Selector(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing is left to happen, and somebody still waits")
        self._clock.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is a clock's, and whose threads are callbacks."""

    def __init__(self, clock: VirtualClock, chance: random.Random) -> None:
        super().__init__(_Selector(clock))
        self.clock, self.chance = clock, chance
        self.defects: list[str] = []
        self._free: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # when each has no work
        self.set_exception_handler(self._note)

    def _note(self, _: Any, context: dict[str, Any]) -> None:
        self.defects.append(f"{context.get('message')}: {context.get('exception')!r}")

    def time(self) -> float:
        return self.clock.now

    def call_soon_threadsafe(
        self,
        callback: Callable[..., object],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Do it later. An executor has one thread: what it is given second begins when the first
        has ended, and what is cancelled before it has begun is left out."""
        future: asyncio.Future[Any] = self.create_future()
        begins = (
            self.time() if executor is None else max(self.time(), self._free.get(executor, 0.0))
        )
        ends = begins + self.chance.random() * 0.01
        if executor is not None:
            self._free[executor] = ends

        def begin() -> None:
            if not future.cancelled():
                self.call_at(ends, work)

        def work() -> None:
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_at(begins, begin)
        return future

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *_: Any, sock: Any = None, **__: Any
    ) -> tuple[Any, Any]:
        protocol = protocol_factory()
        sock.attach(protocol)
        return sock, protocol


class Wire(asyncio.Transport):
    """One end of a connection in memory, whose bytes come late and in pieces."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self.peer: Wire
        self._protocol: Any = None
        self._coming: deque[bytes] = deque()
        self._scheduled = self._paused = self._ended = self._closed = self.dead = False
        self.frozen = False

    @classmethod
    def pair(cls, loop: VirtualLoop) -> tuple[Wire, Wire]:
        one, other = cls(loop), cls(loop)
        one.peer, other.peer = other, one
        return one, other

    def attach(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)
        self._schedule()

    def write(self, data: Any) -> None:
        if not (self._closed or self.dead or self.frozen or self.peer.dead):
            self.peer._coming.append(bytes(data))
            self.peer._schedule()

    def close(self) -> None:
        if not self._closed:
            self._closed = self.peer._ended = True
            self.peer._schedule()
            self._loop.call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._schedule()

    def kill(self) -> None:
        """End as a process does that is killed: the last bytes may be half a message."""
        rest = b"".join(self.peer._coming)
        cut = rest[: self._loop.chance.randint(0, len(rest))]
        self.peer._coming = deque([cut] if cut else ())
        self.dead = self.peer._ended = True
        self.peer._schedule()

    def _schedule(self) -> None:
        if self._protocol is not None and not (self._scheduled or self._paused):
            self._scheduled = True
            self._loop.call_later(self._loop.chance.random() * 0.004, self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self._paused or self._closed or self.dead or self.frozen:
            return
        data = b"".join(self._coming)
        self._coming.clear()
        if len(data) > 1 and self._loop.chance.random() < 0.1:
            cut = self._loop.chance.randint(1, len(data) - 1)
            self._coming.append(data[cut:])
            data = data[:cut]
        if data:
            self._protocol.data_received(data)
        if self._coming:
            self._schedule()
        elif self._ended:
            self._protocol.eof_received()


class VirtualPool:
    """Threads that read prompts, as callbacks."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._loop = cast(VirtualLoop, asyncio.get_running_loop())

    def submit(self, work: Callable[..., None], *args: Any) -> None:
        self._loop.call_later(self._loop.chance.random() * 0.02, work, *args)

    def shutdown(self, **_: Any) -> None:
        """Nothing runs that could be waited for."""


class VirtualThread(EngineThread):
    """The thread that steps, as callbacks: a step each."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.ended, self.steps = driver, False, 0
        self._loop = cast(VirtualLoop, asyncio.get_running_loop())
        self._closing = self._rung = False

    @property
    def is_alive(self) -> bool:
        return not self.ended

    def ring(self) -> None:
        if not (self._rung or self._loop.is_closed()):
            self._rung = True
            self._loop.call_later(0.005 + self._loop.chance.random() * 0.02, self._turn)

    def join(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.driver.end_all(CANCELLED)

    def _turn(self) -> None:
        self._rung = False
        if self._closing:
            self._end()
        elif self.driver.busy:
            answers = iter((False,))
            try:
                self.driver.step_until(lambda: next(answers, True))
            except Exception as error:
                self.driver.end_inside(FinishReason("error", error))
            self.steps += 1
            self.ring()
        elif (due := self.driver.deadline) is not None:
            self._loop.call_at(due, self.ring)


class FlakyExecutor(HashExecutor):
    """The hash model on a machine that fails now and then, before a step changes anything."""

    fails = 0

    def run(self, work: Work) -> StepOutput:
        if FlakyExecutor.fails and len(work.rows):
            FlakyExecutor.fails -= 1
            raise RuntimeError("a fault of the machine")
        return super().run(work)


def hash_model() -> LanguageModel:
    """The hash model, for the vocabulary of the tiny tokenizer, as users have models."""
    model = tiny_llama(vocab_size=320, max_position_embeddings=4096)

    def executor(*_: Any, **__: Any) -> HashExecutor:
        return FlakyExecutor(320, model.width)

    model.executor = executor  # type: ignore[method-assign, assignment]
    return model


class VirtualMooring(Mooring):
    """A place for engines of virtual time, which can be killed."""

    def __init__(
        self, loop: VirtualLoop, model: LanguageModel, tokenizer: Tokenizer, limits: EngineLimits
    ) -> None:
        self._loop, self._model, self._tokenizer, self._limits = loop, model, tokenizer, limits
        self.host: EngineHost | None = None
        self.hosted: HostedModel | None = None
        self.task: asyncio.Task[None] | None = None
        self._wire: Wire | None = None

    def start(self) -> socket.socket:
        ours, theirs = Wire.pair(self._loop)
        self._wire = theirs
        self.hosted = HostedModel(self._model, self._tokenizer, self._limits, trials=TRIALS)
        self.host = own = EngineHost({"tiny": self.hosted}, self._limits)

        async def live() -> None:
            await asyncio.sleep(self._loop.chance.random() * 2.0)
            await own.serve(cast(socket.socket, theirs))

        self.task = self._loop.create_task(live())
        return cast(socket.socket, ours)

    def end(self) -> None:
        """Nothing is waited for: an engine that was killed is dead, others end by themselves."""

    def freeze(self) -> None:
        """Let the engine hear and say nothing any more."""
        if self._wire is not None:
            self._wire.frozen = True

    def kill(self) -> None:
        """End the engine as a signal does."""
        if self._wire is not None and self.task is not None:
            self._wire.kill()
            self.task.cancel()


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def virtual(chance: random.Random) -> Iterator[VirtualLoop]:
    """A loop of virtual time, whose clock is everybody's while the body runs."""
    clock = VirtualClock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_thread, "EngineThread", VirtualThread)
        for one in (host, link):
            patch.setattr(one, "WINDOW", 3)  # so that readers are often waited for
        patch.setattr(engine_thread, "ThreadPoolExecutor", VirtualPool)
        patch.setattr(time, "monotonic", clock)
        patch.setattr(time, "time", lambda: clock.wall + clock.now)
        loop = VirtualLoop(clock, chance)
        try:
            yield loop
        finally:
            FlakyExecutor.fails = 0
            left = asyncio.all_tasks(loop)
            for one in left:
                one.cancel()
            with suppress(Stuck):
                loop.run_until_complete(_ended(left))
            loop.close()
