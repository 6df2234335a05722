"""The one thing that steps an engine, for calls, streams, runs and threads alike.

A step reads the weights once, for however many requests. So whoever waits for something stands in
line: the first takes the steps, and the others wait until what they want is there, or until they
are the first. Between two steps requests come and go.

What a step reports is put into the mailboxes of those who submitted. An interrupt may end any of
these methods anywhere: what a thread enters in a list is entered inside the `try` whose `finally`
removes it, as its first act, and what was reported and not delivered yet is delivered by the next
step of whoever takes it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from everystep.engine import Continuous, Engine
from everystep.errors import RequestError
from everystep.executors.native.executor import NativeExecutor
from everystep.models.model import Model
from everystep.nn.modes import inference_mode
from everystep.stops.ends import moment
from everystep.types import Event, FinishReason, Group, Request, took

_PATIENCE = 1.0  # seconds after which a waiting thread looks again, should a notice have been lost
_COURTESY = 0.001  # seconds for which a step waits for requests that want to come in before it
T = TypeVar("T")
CANCELLED = FinishReason("cancelled")


class Mailbox:
    """The results of one call's requests as they come in, which its owner alone reads.

    `groups`: those of the requests, in their order, as far as they have come in. `events`: what was
    reported of them and not taken yet, in the order of the engine. `most`: how many may wait before
    the groups are set aside until the owner has caught up, None for any number. `notice`: called in
    the thread that steps, when there is something new; it must neither wait nor raise. `error`: why
    the engine refused a request. `leaving`: how the groups are to end before the next step.
    `dropped`: it left while it stood in line, and never begins. `over`: nothing more will be put
    into it. `deadline`: the first moment at which one of the requests is to end, None without any.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        *,
        events: deque[Event] | None = None,
        most: int | None = None,
        notice: Callable[[], object] | None = None,
    ) -> None:
        self.requests = tuple(requests)
        self.most = most
        self.notice = notice
        self.groups: list[Group] = []
        self.events: deque[Event] = deque() if events is None else events
        self.error: Exception | None = None
        self.leaving: FinishReason | None = None
        self.aside = False
        self.dropped = False
        self.over = False
        self.names: dict[str, str] = {}  # as the engine calls a request -> as its owner does
        moments = (one.deadline for one in self.requests if one.deadline is not None)
        self.deadline = min(moments, default=None)

    @property
    def took(self) -> tuple[float, float]:
        """The seconds from its beginning until all had their first tokens, and until now or its
        end; what ended before a token was opened by its end."""
        now, times = moment(), [one.times for one in self.groups if one.times]
        since = max((one["began"] for one in times), default=now)
        taken = [[one["began"] - since + part for part in took(one, now)] for one in times]
        first, total = map(max, zip(*taken, strict=True)) if taken else (0.0, 0.0)
        return first, total

    @property
    def begun(self) -> bool:
        """True once it stands in line no longer."""
        entered = len(self.groups) >= len(self.requests)
        return entered or self.dropped or self.error is not None

    @property
    def caught_up(self) -> bool:
        """True where few enough events wait that more may be made."""
        return self.most is None or len(self.events) <= self.most // 2


class _Waiting:
    """A thread that waits until something is over, which is checked between two steps."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over
        self.over = False


class Driver:
    """An engine whose requests come from any number of callers, each in any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._boxes: dict[str, Mailbox] = {}  # by the names that the engine knows
        self._line: deque[Mailbox] = deque()  # posted, and not begun
        self._reported: list[Event] = []  # and not delivered
        self._departing: deque[Mailbox] = deque()
        self._returning: deque[Mailbox] = deque()
        self._serial = 0
        self._steps = 0  # begun
        self.open_locks()
        reopen_after_fork(self)

    def open_locks(self) -> None:
        """Make the locks anew, as a forked child needs it; nobody waits."""
        self._turn = threading.RLock()  # held while a thread works with the engine
        self._stepping: int | None = None  # the thread that steps
        self._changed = threading.Condition()
        self._waiting: list[weakref.ref[_Waiting]] = []  # the first takes the steps
        self._coming: list[object] = []  # threads that want to submit before the next step

    @property
    def busy(self) -> bool:
        """True where a step, or what is done between two, would change something: not where every
        group is set aside."""
        asked = self._departing or self._returning or self._line or self._reported
        scheduler = self.engine.scheduler
        if isinstance(scheduler, Continuous):
            due = self.deadline
            late = due is not None and moment() >= due
            return bool(asked or late or scheduler.running or scheduler.waiting)
        return bool(asked or self.engine.pending)

    @property
    def deadline(self) -> float | None:
        """The next moment at which a request is to end, whether it runs, waits or is set aside."""
        boxes = (*list(self._boxes.values()), *list(self._line))
        return min((one.deadline for one in boxes if one.deadline is not None), default=None)

    @property
    def step_under_way(self) -> int | None:
        """The number of the step that a thread takes now, None between two."""
        return None if self._stepping is None else self._steps

    # --- coming and going -------------------------------------------------------------------------

    def submit(
        self,
        requests: Iterable[Request],
        *,
        events: deque[Event] | None = None,
        most: int | None = None,
    ) -> Mailbox:
        """Let the requests take part from the next step on; waits for a step that is under way.

        `events`: where their events go, a queue of the caller's that other mailboxes may share.

        Raises what the engine says of a request that it cannot serve; then none takes part.
        """
        box, mark = Mailbox(requests, events=events, most=most), object()
        try:
            self._coming.append(mark)
            with self._turn:
                self._enter(box)
        except BaseException:
            self.leave(box)
            raise
        finally:
            _take_out(self._coming, mark)
            self._notify()
        if box.error is not None:
            raise box.error
        return box

    def adopt(self, group: Group, box: Mailbox | None = None) -> Mailbox:
        """Return the mailbox of a group that came into the engine by other ways, such as a fork;
        `box`: the one that it had before."""
        box = Mailbox((group.request,)) if box is None else box
        box.groups, box.leaving, box.over = [group], None, False
        group.times.setdefault("began", moment())
        group.times.pop("ended", None)
        self._boxes[group.request.request_id] = box
        return box

    def end(self, box: Mailbox, reason: FinishReason = CANCELLED) -> None:
        """End what is left of the box now; waits for a step that is under way."""
        self.leave(box, reason)
        with self._turn:
            self._settle()

    def post(self, box: Mailbox) -> None:
        """Put the mailbox in line: it begins, in order of arrival, when the engine has rows for it.

        Never waits. What the engine says of a request that it cannot serve is the box's `error`.
        """
        self._line.append(box)

    def leave(self, box: Mailbox, reason: FinishReason = CANCELLED) -> None:
        """Let what is left of the box end before the next step.

        Never waits, since garbage collection may call it inside of a step.
        """
        if box.leaving is None:
            box.leaving = reason
            self._departing.append(box)

    def take_back(self, box: Mailbox) -> None:
        """Let a box that was set aside go on, if its owner has caught up; never waits."""
        if box.aside and box.caught_up:
            self._returning.append(box)

    def end_inside(self, reason: FinishReason) -> None:
        """End every request that has begun, and report it."""
        for box in list({id(one): one for one in self._boxes.values()}.values()):
            self.leave(box, reason)
        with self._turn:
            self._settle()

    def end_all(self, reason: FinishReason) -> None:
        """End every request that has begun, and report it; those in line never begin."""
        for box in list(self._line):
            self.leave(box, reason)
        self.end_inside(reason)

    # --- stepping ---------------------------------------------------------------------------------

    @contextmanager
    def alone(self) -> Iterator[Engine]:
        """Keep others from stepping while the body works with the engine.

        RequestError inside of a step of this thread.
        """
        if self.is_stepping_here():
            raise RequestError(
                "this cannot be done from within a step",
                got="a call by code that the step itself calls",
                do="Do it between two steps",
            )
        with self._turn:
            yield self.engine

    def step(self) -> None:
        """Take one step, whoever else waits."""
        with self._turn:
            self._settle()
            if self.engine.pending:
                self._take_step()

    def step_until(self, is_over: Callable[[], bool]) -> None:
        """Return once `is_over()`; until then steps are taken, here or in another thread.

        `is_over` is also asked in the thread that steps.
        """
        me = _Waiting(is_over)
        mark = weakref.ref(me)
        try:
            self._waiting.append(mark)
            while not me.over:
                if self._first() is me:
                    self._step_first(me)
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: me.over or self._first() is me, _PATIENCE)
        finally:
            _take_out(self._waiting, mark)
            self._notify()

    def _first(self) -> _Waiting | None:
        """Return who takes the next step."""
        while self._waiting:
            if (found := self._waiting[0]()) is not None:
                return found
            # An interrupt kept it from going: its frame is gone.
            _take_out(self._waiting, self._waiting[0])
        return None

    def is_stepping_here(self) -> bool:
        """Return whether this thread is inside a step."""
        return self._stepping == threading.get_ident()

    def _step_first(self, first: _Waiting) -> None:
        """Take one step, unless what the first in line waits for is over; then all are checked."""
        if self._coming:
            with self._changed:
                self._changed.wait(_COURTESY)
        with self._turn:
            self._settle()
            if not first.is_over():
                self._take_step()
            for one in [mark() for mark in list(self._waiting)]:
                if one is not None:
                    one.over = one.over or one.is_over()
        self._notify()

    def _take_step(self) -> None:
        try:
            self._steps += 1
            self._stepping = threading.get_ident()
            with inference_mode():
                self._reported.extend(self.engine.step())
        finally:
            self._stepping = None
        self._deliver()

    def _settle(self) -> None:
        """Do what was asked for since the last step: who leaves, who goes on, who begins."""
        self._deliver()
        while self._departing:
            self._end(self._departing[0])
            self._departing.popleft()
        while self._returning:
            self._go_on(self._returning[0])
            self._returning.popleft()
        now = moment() if self.deadline is not None else 0.0
        for box in list(self._line):
            # The engine ends it in its next step, with the reason "time".
            if (due := box.deadline) is not None and now >= due:
                self._begin(box)
        while self._line and self._has_room():
            self._begin(self._line[0])

    def _begin(self, box: Mailbox) -> None:
        self._enter(box)
        _take_out(self._line, box)

    def _has_room(self) -> bool:
        """Return whether the engine has rows for the first in line, or it has left."""
        scheduler = self.engine.scheduler
        if not isinstance(scheduler, Continuous):
            return True
        rows = sum(group.rows for group in scheduler.groups if group not in scheduler.aside)
        return self._line[0].leaving is not None or rows < scheduler.max_rows

    def _enter(self, box: Mailbox) -> None:
        """Submit the requests of the box, none of which was submitted if one is refused."""
        while not box.begun and box.leaving is None:
            request = box.requests[len(box.groups)]
            name = request.request_id
            while name in self._boxes:
                name = f"{request.request_id}.{self._serial}"
                self._serial += 1
            if name != request.request_id:
                box.names[name] = request.request_id
                request = replace(request, request_id=name)
            try:
                self._boxes[name] = box
                box.groups.append(self.engine.submit(request))
                box.groups[-1].times["began"] = moment()
            except Exception as error:
                box.error, box.leaving = error, CANCELLED
                self._end(box)

    def _end(self, box: Mailbox) -> None:
        """End what is left of a box that leaves; one in line never begins."""
        if not box.begun:
            box.dropped = True
            _take_out(self._line, box)
        # Found by name: an interrupted submission may have come in without being in the box.
        inside = self.engine.scheduler.groups
        for group in [one for one in inside if self._boxes.get(one.request.request_id) is box]:
            with inference_mode():
                self._reported.extend(self.engine.cancel(group, box.leaving))
        self._deliver()
        if box.begun and not box.groups:
            box.over = True
            _tell(box)

    def _deliver(self) -> None:
        """Put what was reported into the mailboxes, set those aside whose owners are behind, and
        close those whose groups are over, now that all of it is in them."""
        parcels: dict[Mailbox, list[Event]] = {}
        for event in self._reported:
            box = self._boxes[event.request_id]
            name = box.names.get(event.request_id)
            parcels.setdefault(box, []).append(
                event if name is None else replace(event, request_id=name)
            )
        queues = [box.events for box in parcels]
        # One line: an interrupt finds all of it delivered, or none.
        self._reported, _ = [], deque(map(deque.extend, queues, parcels.values()), maxlen=0)
        for box in parcels:
            if box.most is not None and len(box.events) >= box.most and not box.aside:
                self._set_aside(box)
            _tell(box)
        now = moment()
        for name, box in list(self._boxes.items()):
            for group in box.groups:
                if group.opened:
                    group.times.setdefault("opened", now)
                if not group.live:
                    group.times.setdefault("ended", now)
            if box.begun and not any(group.live for group in box.groups):
                # First of all: whoever was interrupted here finds it again by its name.
                box.over = True
                _tell(box)
                del self._boxes[name]

    def _set_aside(self, box: Mailbox) -> None:
        scheduler = self.engine.scheduler
        if isinstance(scheduler, Continuous):
            for group in box.groups:
                if group.live:
                    scheduler.set_aside(group)
            box.aside = True
            # The owner looks at `aside` after taking an event; so what was taken before counts.
            if box.caught_up:
                self._go_on(box)

    def _go_on(self, box: Mailbox) -> None:
        scheduler = self.engine.scheduler
        if box.aside and isinstance(scheduler, Continuous):
            for group in box.groups:
                if group.live:
                    scheduler.take_back(group)
            box.aside = False

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


@contextmanager
def freed(driver: Driver, box: Mailbox) -> Iterator[None]:
    """Free all rows of the box if the body fails, even if only a streamer does."""
    try:
        yield
    except BaseException:
        driver.end(box)
        raise


def finished(driver: Driver, requests: Iterable[Request]) -> list[Group]:
    """Return the groups of requests that nobody follows, once all of them are over.

    Raises the error of the first one that ended by one; then nothing of the others is left.
    """
    box = driver.submit(requests, events=deque(maxlen=0))
    with freed(driver, box):
        while not box.over:
            driver.step()
        for group in box.groups:
            if group.error is not None:
                raise group.error
    return box.groups


def _take_out(found: list[T] | deque[T], one: T) -> None:
    """Remove it from what other threads may add to meanwhile, if it is there."""
    if one in found:
        found.remove(one)


def _tell(box: Mailbox) -> None:
    if box.notice is not None:
        box.notice()


# --- drivers that calls share ---------------------------------------------------------------------

_Drivers = WeakValueDictionary[Hashable, Driver]
_OPEN: WeakKeyDictionary[Model, _Drivers] = WeakKeyDictionary()
_OPENING = threading.Lock()


def shared_driver(model: Model, key: Hashable, opened: Callable[[], Engine]) -> Driver:
    """Return the driver of the calls with this key that run on the model now; without any, one
    whose engine is `opened`.

    Only engines whose results do not depend on what is computed beside them are shared.
    """
    with _OPENING:
        drivers = _OPEN.setdefault(model, WeakValueDictionary())
        found = drivers.get(key)
        if found is None or found.is_stepping_here():
            engine = opened()
            found = Driver(engine)
            if isinstance(engine.executor, NativeExecutor):
                drivers[key] = found
        return found


# --- forked children ------------------------------------------------------------------------------


class Locking(Protocol):
    """An object with locks, which nobody holds after `open_locks`."""

    def open_locks(self) -> None:
        """Make the locks anew."""
        ...


_LOCKING: WeakSet[Locking] = WeakSet()


def reopen_after_fork(one: Locking) -> None:
    """Let the object begin with open locks in a forked child, which has none of the threads that
    step in its parent, but may have their locks."""
    _LOCKING.add(one)


def _after_fork() -> None:
    global _OPENING
    _OPEN.clear()
    _OPENING = threading.Lock()
    for one in list(_LOCKING):
        one.open_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
