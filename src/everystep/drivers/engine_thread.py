"""The thread that owns the engine of an `AsyncEngine`, and what passes between it and its readers.

Whoever wants something of the engine puts a message into the inbox, which is safe from any thread
and from finalizers. The thread writes the events of a prompt into its `Submission`, wakes the
reader, and sets a prompt aside while its reader is behind.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast
from weakref import WeakSet

from everystep.drivers.session import PromptLike, Session
from everystep.engine import Continuous
from everystep.errors import CapacityError, RequestError
from everystep.requests.options import Options
from everystep.streamers import Wording
from everystep.types import Event, FinishReason, Group

_started: WeakSet[EngineThread] = WeakSet()


class Submission:
    """A prompt that was submitted: the engine thread writes what becomes of it, one reader reads.

    `most`: how many events may wait for the reader, or None where only the end is awaited. `over`:
    nothing will be added any more; then `result` or `error` says what became of it.
    """

    def __init__(self, prompt: PromptLike, options: Options, most: int | None) -> None:
        self.prompt = prompt
        self.options = options
        self.most = most
        self.events: deque[Event] = deque()
        self.over = False
        self.result: Any = None
        self.error: Exception | None = None
        # Below: of the engine thread alone, but for the waiter, which is the reader's.
        self.group: Group | None = None
        self.wording = Wording(None)
        self.aside = False
        self.left = False
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    async def news(self) -> None:
        """Returns when there is an event to read or all is over, in the loop that runs."""
        if self._waiter is not None:
            raise RequestError(
                "two tasks read one stream", wanted="one reader", do="Make a stream for each"
            )
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiter = loop, waiter
        try:
            # Looked at after the waiter is set: what the thread adds from now on wakes it.
            if not self.events and not self.over:
                await waiter
        finally:
            self._waiter = None

    def wake(self) -> bool:
        """Has the reader look again; False if its loop is closed, so that it never will."""
        if (waiting := self._waiter) is None:
            return True
        loop, waiter = waiting
        try:
            loop.call_soon_threadsafe(_set, waiter)
        except RuntimeError:
            return False
        return True

    def end(self, result: Any, error: Exception | None) -> None:
        """Nothing more comes."""
        self.result, self.error = result, self.error or error
        self.over = True

    def hear(self, event: Event) -> None:
        """The event waits for the reader, with its text."""
        if self.most is None or self.left:
            return
        try:
            self.events.append(self.wording(event))
        except Exception as error:
            self.error, self.left = error, True

    @property
    def caught_up(self) -> bool:
        """Whether few enough events wait that more may be made."""
        return self.most is None or len(self.events) <= self.most // 2


class EngineThread:
    """Runs one session in a thread of its own, which begins with the first prompt."""

    def __init__(self, session: Session, scheduler: Continuous, most_waiting: int | None) -> None:
        self.session = session
        self.closed = False
        self._scheduler = scheduler
        self._most_waiting = most_waiting
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()  # of the next three, and of `closed`
        self._thread: threading.Thread | None = None
        self._process = 0
        self._accepted = 0
        # Below: of the engine thread alone; `_begun` is read by others.
        self._begun = 0
        self._line: deque[tuple[int, Submission]] = deque()
        self._inside: dict[str, Submission] = {}
        self._closing = False

    # --- from any thread --------------------------------------------------------------------------

    def submit(self, one: Submission) -> int:
        """The prompt is in line, with the number that is returned; CapacityError if it is full."""
        with self._lock:
            self._require_open()
            waiting = self._accepted - self._begun
            if self._most_waiting is not None and waiting >= self._most_waiting:
                raise CapacityError(
                    "too many prompts wait for the engine",
                    wanted=f"at most {self._most_waiting}",
                    got=f"{waiting} and this one",
                    do="Try again later, or raise max_waiting",
                )
            if self._thread is None:
                self._start()
            number, self._accepted = self._accepted, self._accepted + 1
            self._inbox.put(partial(self._line.append, (number, one)))
        return number

    def leave(self, one: Submission) -> None:
        """Nobody reads this prompt any more: it will end soon. Safe in a finalizer."""
        if not one.over:
            self._inbox.put(partial(self._drop, one))

    def make_room(self, one: Submission) -> None:
        """The reader has taken an event: a prompt that was set aside may go on."""
        if one.aside and one.caught_up:
            self._inbox.put(partial(self._take_back, one))

    def close(self) -> None:
        """Takes no more prompts and ends those inside, soon. Safe in a finalizer."""
        self._inbox.put(self._stop)

    def join(self) -> None:
        """Returns when the thread has ended, which `close` makes it do."""
        with self._lock:
            self.closed = True
            thread = self._thread
        if thread is not None:
            self.close()
            thread.join()

    def require_here(self) -> None:
        """RequestError in a forked child of the process that the thread runs in."""
        if self._thread is not None and self._process != os.getpid():
            raise RequestError(
                "this engine runs in the process that this one was forked from",
                do="Make an AsyncEngine in each process, or fork before its first prompt",
            )

    def _require_open(self) -> None:
        self.require_here()
        if self.closed:
            raise RequestError("the engine is closed", do="Make another AsyncEngine")

    def _start(self) -> None:
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="everystep engine", daemon=True)
        _started.add(self)
        self._thread.start()

    # --- in the engine thread ---------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hear(wait=not self._busy)
                self._begin()
                if self._busy:
                    self._step()
        finally:
            self._finish()

    @property
    def _busy(self) -> bool:
        """Whether there is something to step, now or when those in line have begun."""
        return bool(self._line or self._scheduler.running or self._scheduler.waiting)

    def _hear(self, *, wait: bool) -> None:
        """Does what the messages ask for; waits for the first one if there is nothing else."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            return

    def _stop(self) -> None:
        self._closing = True

    def _begin(self) -> None:
        """Prompts enter the engine in order of arrival while it has rows for them."""
        groups = [*self._scheduler.running, *self._scheduler.waiting]
        rows = sum(group.rows for group in groups)
        while self._line and rows < self._scheduler.max_rows and not self._closing:
            number, one = self._line.popleft()
            self._begun += 1
            try:
                one.group = group = self.session.submit(one.prompt, number, one.options)
            except Exception as error:
                self._over(one, None, error)
                continue
            rows += group.rows
            self._inside[group.request.request_id] = one
            if one.most is not None:
                one.wording = Wording(self.session.tokenizer)
                if (trim := self.session.trim(group)) is not None:
                    one.wording.trim(group.request.request_id, *trim)

    def _step(self) -> None:
        try:
            events = self.session.step()
        except Exception as error:
            # It is nobody's in particular, such as a lack of memory: all prompts end with it.
            self._end_all(FinishReason("error", error))
        else:
            self._deliver(events)

    def _deliver(self, events: list[Event]) -> None:
        """Every prompt gets its events; those that are over end, and those behind are set aside."""
        heard = {event.request_id: self._inside[event.request_id] for event in events}
        for event in events:
            heard[event.request_id].hear(event)
        for name, one in heard.items():
            group = cast(Group, one.group)
            if not group.live:
                del self._inside[name]
                self._over(one, *self._outcome(one, group))
            elif one.left or (one.events and not one.wake()):
                self._drop(one)
            elif one.most is not None and len(one.events) >= one.most and not one.aside:
                self._set_aside(one)

    def _outcome(self, one: Submission, group: Group) -> tuple[Any, Exception | None]:
        """What a group that has ended became: results for a stream, else what `generate` gives."""
        try:
            if one.most is not None:
                return self.session.generated(group), None
            cancelled = any(done.reason.kind == "cancelled" for done in group.done)
            return self.session.shaped(group), _closed() if cancelled else group.error
        except Exception as error:
            return None, error
        finally:
            self.session.forget(group)

    def _over(self, one: Submission, result: Any, error: Exception | None) -> None:
        one.end(result, error)
        one.wake()

    def _drop(self, one: Submission) -> None:
        """The prompt ends here and tells nobody."""
        one.left = True
        if one.over:
            return
        one.events.clear()
        if one.group is not None:
            self._deliver(self.session.engine.cancel(one.group))
            return
        self._line = deque(pair for pair in self._line if pair[1] is not one)
        self._begun += 1
        self._over(one, None, None)

    def _set_aside(self, one: Submission) -> None:
        self._scheduler.set_aside(cast(Group, one.group))
        one.aside = True
        # The reader looks at `aside` after it has taken an event; so what it took before counts.
        if one.caught_up:
            self._take_back(one)

    def _take_back(self, one: Submission) -> None:
        if one.aside and not one.over:
            one.aside = False
            self._scheduler.take_back(cast(Group, one.group))

    def _end_all(self, reason: FinishReason) -> None:
        for one in list(self._inside.values()):
            self._deliver(self.session.engine.cancel(cast(Group, one.group), reason))

    def _finish(self) -> None:
        """Whatever is left ends, however the thread came to its end."""
        with self._lock:
            self.closed = True
        self._hear(wait=False)
        try:
            self._end_all(FinishReason("cancelled"))
        finally:
            for one in [*self._inside.values(), *(one for _, one in self._line)]:
                self._over(one, None, _closed())


def _closed() -> RequestError:
    return RequestError(
        "the engine was closed before the prompt ended", do="Close it when all are read"
    )


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _end_before_exit() -> None:
    """Threads that wait for messages end before the interpreter waits for them."""
    for one in list(_started):
        one.close()


# After that of `executors.process`, which is imported above, so it runs before it.
atexit.register(_end_before_exit)
