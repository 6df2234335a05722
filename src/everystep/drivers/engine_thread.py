"""Threads that own engines, and the desk where prompts of any thread or event loop are handed in.

A prompt is read by a thread of its bringer's, never by one that steps: text, template, schema and
pictures become a `Request` there, and the thread that steps gets that. Whoever wants something of
an engine rings; messages are safe from any thread and from finalizers.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

from everystep.drivers.driver import CANCELLED, Driver, Mailbox
from everystep.drivers.generated import Reply
from everystep.drivers.session import Session
from everystep.errors import CapacityError, RequestError
from everystep.processors.grammars.trials import GrammarTrials, on_trial
from everystep.requests.options import Options
from everystep.requests.prompts import PromptLike
from everystep.stops.ends import moment
from everystep.streamers import Wording
from everystep.types import Event, FinishReason, Group

_started: WeakSet[EngineThread] = WeakSet()
_READERS = 4
"""Threads that read prompts; long ones have as many of their own, so that short ones pass them."""
_LONG = 1 << 16
"""Characters or ids from which on a prompt is long."""
R = TypeVar("R")


class EngineThread:
    """A thread that takes the steps of one driver, as long as there are any to take."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="everystep engine", daemon=True)
        _started.add(self)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True until it has ended."""
        return self._thread.is_alive()

    def ring(self) -> None:
        """Have the thread look whether there is something to do. Safe in a finalizer."""
        self._bell.put(None)

    def close(self) -> None:
        """End what is inside, then the thread, soon. Safe in a finalizer."""
        self._closing = True
        self.ring()

    def join(self) -> None:
        """Return when the thread has ended, which `close` makes it do."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait()
                while self.driver.busy and not self._closing:
                    self._step()
        finally:
            self.driver.end_all(CANCELLED)

    def _wait(self) -> None:
        """Wait until somebody rings, or the deadline of one that is set aside has come."""
        due = self.driver.deadline
        try:
            self._bell.get(timeout=None if due is None else max(due - moment(), 0.0))
        except Empty:
            return

    def _step(self) -> None:
        try:
            self.driver.step_until(lambda: self._closing or not self.driver.busy)
        except Exception as error:
            # It is nobody's in particular, such as a lack of memory: all that is inside ends.
            self.driver.end_inside(FinishReason("error", error))


class Submission:
    """A prompt that was handed in: read by one thread, stepped by another, followed by one reader.

    `reply`: how it is answered, once its options are read. `box`: what becomes of it, once it was
    read. `error`: why it was not read. `left`: nobody follows it any more.
    """

    def __init__(self, number: int, notice: Callable[[], object]) -> None:
        self.number = number
        self.notice = notice
        self.reply: Reply | None = None
        self.box: Mailbox | None = None
        self.thread: EngineThread | None = None
        self.error: Exception | None = None
        self.read = False  # or left before that, or refused
        self.left = False

    @property
    def waits(self) -> bool:
        """True until it has begun, or never will."""
        return not (self.left or self.error is not None or (self.box and self.box.begun))

    @property
    def over(self) -> bool:
        """True once nothing more comes of it."""
        if self.box is None:
            return self.read
        return self.box.over

    def answer(self) -> Reply:
        """Return how it is answered; raise what kept it from being read."""
        if self.reply is None:
            raise self.error or ended_early()
        return self.reply

    def group(self) -> Group:
        """Return the group of a prompt that has begun; raise what kept it from beginning."""
        for error in (self.error, None if self.box is None else self.box.error):
            if error is not None:
                raise error
        if self.box is None or not self.box.groups:
            raise ended_early()
        return self.box.groups[0]

    def wording(self) -> Wording:
        """Return what gives its events their text."""
        if self.reply is None or self.box is None:
            return Wording(None)
        made, (request,) = Wording(self.reply.tokenizer), self.box.requests
        self.reply.spell(made, request)
        return made

    def hand_over(self, thread: EngineThread, box: Mailbox) -> None:
        """Put what was read in line for the thread that steps."""
        self.thread, self.box = thread, box
        thread.driver.post(box)
        if self.left:
            thread.driver.leave(box)
        thread.ring()

    def leave(self) -> None:
        """End the prompt soon, since nobody follows it. Safe in a finalizer."""
        self.left = True
        if (box := self.box) is not None and not box.over and (thread := self.thread) is not None:
            thread.driver.leave(box)
            thread.ring()

    def caught_up(self) -> None:
        """Let a prompt that was set aside go on, where its reader has taken enough events."""
        if (box := self.box) is not None and box.aside and (thread := self.thread) is not None:
            thread.driver.take_back(box)
            thread.ring()


@dataclass(slots=True)
class _Unread:
    """A thing that waits to be read. `left`: nobody wants it any more, once this is true."""

    future: Future[Any]
    read: Callable[[], Any]
    left: Callable[[], bool]

    @property
    def wanted(self) -> bool:
        """True while somebody waits for it."""
        return not (self.future.cancelled() or self.left())

    def resolve(self) -> None:
        """Read it, if it is wanted."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.read())
        except BaseException as error:
            self.future.set_exception(error)


class FairReaders:
    """Threads that read what several owners bring: next is what an owner brought who has fewest
    threads, of these the one whose turn is longest ago. An owner has half of them at most; what has
    none may have all."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._half = max(1, threads // 2)
        self._lock = threading.Lock()  # of all below
        self._free = threads
        self._busy: Counter[str | None] = Counter()
        self._waiting: OrderedDict[str | None, deque[_Unread]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of things that wait to be read."""
        return sum(map(len, self._waiting.values()))

    def submit(
        self,
        owner: str | None,
        read: Callable[..., R],
        *given: object,
        left: Callable[[], bool] = lambda: False,
    ) -> Future[R]:
        """Have something read in its owner's turn, unless it is left before."""
        future: Future[R] = Future()
        with self._lock:
            queue = self._waiting.setdefault(owner, deque())
            if not all(one.wanted for one in queue):
                kept = [one for one in queue if one.wanted]
                queue.clear()
                queue.extend(kept)
            queue.append(_Unread(future, partial(read, *given), left))
            self._begin()
        return future

    def shutdown(self, *, cancel: bool) -> None:
        """Take nothing more, soon. What waits is cancelled, or else read in any order."""
        with self._lock:
            waiting, self._waiting = self._waiting, OrderedDict()
            for one in (one for queue in waiting.values() for one in queue):
                if cancel:
                    one.future.cancel()
                else:
                    self._pool.submit(one.resolve)
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        """Begin whatever may begin; the lock is held."""
        while self._free:
            each = [one for one in self._waiting if one is None or self._busy[one] < self._half]
            if not each:
                return
            owner = min(each, key=self._busy.__getitem__)  # the first of those that have fewest
            queue = self._waiting.pop(owner)
            one = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            self._free -= 1
            self._busy[owner] += 1
            self._pool.submit(self._read, owner, one)

    def _read(self, owner: str | None, one: _Unread) -> None:
        try:
            one.resolve()
        finally:
            with self._lock:
                self._free += 1
                self._busy[owner] -= 1
                if not self._busy[owner]:
                    del self._busy[owner]
                self._begin()


class Desk:
    """The desk where prompts of one session are handed in, with the threads that serve it.

    `most_waiting`: how many may wait that have not begun, those that are being read among them;
    None for any number. `trials`: where grammars are compiled first, None for nowhere.
    """

    def __init__(
        self,
        session: Session,
        most_waiting: int | None,
        trials: GrammarTrials | None = None,
    ) -> None:
        self.session, self._trials = session, trials
        self.closed = False
        self._most_waiting = most_waiting
        self._lock = threading.Lock()  # of all below
        self._threads: dict[Driver, EngineThread] = {}
        self._short: ThreadPoolExecutor | None = None
        self._long: FairReaders | None = None
        self._process = os.getpid()
        self._number = 0
        self._waiting: list[Submission] = []

    # --- handing in -------------------------------------------------------------------------------

    def submit(
        self,
        prompt: PromptLike,
        options: Callable[[], Options],
        notice: Callable[[], object],
        most: int | None,
        *,
        long: bool = False,
        owner: str | None = None,
    ) -> Submission:
        """Take the prompt in; CapacityError if too many wait.

        `options`: gives what is asked for it, in the thread that reads. `notice`: called, in any
        thread, when there is something new. `most`: how many events may wait for the reader.
        `long`: what is asked for it may take long to read. `owner`: whose it is; what takes long is
        read for one owner after another.
        """
        with self._lock:
            self._require_open()
            self._waiting = [one for one in self._waiting if one.waits]
            waiting = len(self._waiting)
            if self._most_waiting is not None and waiting >= self._most_waiting:
                raise CapacityError(
                    "too many prompts wait for the engine",
                    wanted=f"at most {self._most_waiting}",
                    got=f"{waiting} and this one",
                    do="Try again later, or raise max_waiting",
                )
            one = Submission(self._number, notice)
            self._number += 1
            self._waiting.append(one)
            if self._short is None or self._long is None:
                self._process = os.getpid()
                self._short = ThreadPoolExecutor(_READERS, "everystep reader")
                self._long = FairReaders(_READERS, "everystep reader of long prompts")
            if long or _is_long(prompt):
                own = one, prompt, options, most
                self._long.submit(owner, self._read, *own, left=lambda: one.left)
            else:
                self._short.submit(self._read, one, prompt, options, most)
        return one

    def _read(
        self,
        one: Submission,
        prompt: PromptLike,
        options: Callable[[], Options],
        most: int | None,
    ) -> None:
        """Turn the prompt into a request, in the thread of a reader, and hand it to an engine."""
        try:
            if one.left:
                return
            with on_trial(self._trials):
                own = options()
                one.reply = Reply(own, self.session.tokenizer)
                request = self.session.own_request(prompt, one.number, own)
            driver = self.session.driver(request)
            # Of a prompt whose end alone is awaited no event is kept.
            kept: deque[Event] | None = deque(maxlen=0) if most is None else None
            box = Mailbox((request,), events=kept, most=most, notice=one.notice)
            with self._lock:
                self._refuse_late()
                thread = self._threads.get(driver) or EngineThread(driver)
                self._threads[driver] = thread
                one.hand_over(thread, box)
                if self.closed:  # by a finalizer, which takes no lock and saw no such thread
                    thread.close()
        except Exception as error:
            one.error = error
        finally:
            one.read = True
            one.notice()

    @property
    def drivers(self) -> list[Driver]:
        """The drivers of the engines that there are."""
        return list(self._threads)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Take no more prompts and end those inside, soon. Safe in a finalizer."""
        self.closed = True
        for thread in list(self._threads.values()):
            thread.close()

    def join(self) -> None:
        """Return when no thread steps any more, and no row is held."""
        with self._lock:
            self.close()
        if self._short is not None:
            self._short.shutdown(wait=False)
        if self._long is not None:
            self._long.shutdown(cancel=False)
        for thread in self._threads.values():
            thread.join()

    def require_here(self) -> None:
        """Refuse a forked child of the process that the threads run in."""
        if self._short is not None and self._process != os.getpid():
            raise RequestError(
                "this engine runs in the process that this one was forked from",
                do="Make an AsyncEngine in each process, or fork before its first prompt",
            )

    def _require_open(self) -> None:
        self.require_here()
        if self.closed:
            raise RequestError("the engine is closed", do="Make another AsyncEngine")

    def _refuse_late(self) -> None:
        if self.closed:
            raise ended_early()


def ended_early() -> RequestError:
    """Return the error of a prompt whose engine was closed before its end."""
    return RequestError(
        "the engine was closed before the prompt ended", do="Close it when all are read"
    )


def _is_long(prompt: PromptLike) -> bool:
    """Return whether reading a prompt may take long: by its size, or since it holds more than
    ids and text."""
    if isinstance(prompt, str):
        return len(prompt) > _LONG
    if isinstance(prompt, list | tuple) and len(prompt) < _LONG:
        parts = [one.get("content") for one in prompt if isinstance(one, dict)]
        return any(not isinstance(part, str) or len(part) > _LONG for part in parts)
    return True


def _end_before_exit() -> None:
    """End the threads that wait for messages before the interpreter waits for them."""
    for one in list(_started):
        one.close()


# After that of `executors.process`, which is imported above, so it runs before it.
atexit.register(_end_before_exit)
