"""One engine for the calls of several threads: every step serves all of them.

A step reads the weights once, for however many prompts. So calls that run at the same time stand in
line: the first takes the steps, and the others wait until a prompt of theirs has ended, or until
they are the first. Between two steps prompts come and go.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from everystep.config import is_configuration
from everystep.engine import Engine
from everystep.executors.native.executor import NativeExecutor
from everystep.models.model import Model
from everystep.nn.modes import inference_mode
from everystep.types import Group, Request

_PATIENCE = 1.0  # seconds after which a waiting thread looks again, should a notice have been lost
_COURTESY = 0.001  # seconds for which a step waits for prompts that want to come in before it


@dataclass(eq=False)
class _Waiting:
    """A thread that waits until something is over, which is checked between two steps."""

    is_over: Callable[[], bool]
    over: bool = False


class SharedEngine:
    """An engine whose prompts come from any number of calls, each in its own thread.

    An interrupt may end any of these methods anywhere. So whatever a thread enters in a list is
    entered inside the `try` whose `finally` removes it, as its first act.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.Lock()  # held while a thread works with the engine
        self._stepping: int | None = None  # the thread that steps
        self._changed = threading.Condition()
        self._line: list[_Waiting] = []  # the first takes the steps
        self._coming: list[object] = []  # threads that want to submit before the next step
        self._leaving: deque[Group] = deque()  # cancelled before the next step

    def submit(self, request: Request) -> Group:
        """The request takes part from the next step on."""
        mark = object()
        try:
            self._coming.append(mark)
            with self._turn:
                return self._engine.submit(request)
        finally:
            self._coming.remove(mark)
            self._notify()

    def leave(self, groups: Iterable[Group]) -> None:
        """The groups end before the next step. Never waits, since garbage collection may call it
        inside of a step."""
        self._leaving.extend(groups)

    def step_until(self, is_over: Callable[[], bool]) -> None:
        """Returns once `is_over()`; until then steps are taken, here or in another thread."""
        me = _Waiting(is_over)
        try:
            self._line.append(me)
            while not me.over:
                if self._line[0] is me:
                    self._step(me)
                else:
                    with self._changed:
                        self._changed.wait_for(lambda: me.over or self._line[0] is me, _PATIENCE)
        finally:
            self._line.remove(me)
            self._notify()

    def is_stepping_here(self) -> bool:
        """Whether this thread is inside a step."""
        return self._stepping == threading.get_ident()

    def _step(self, first: _Waiting) -> None:
        """One step, unless what the first in line waits for is over; then all are checked."""
        if self._coming:
            with self._changed:
                self._changed.wait(_COURTESY)
        with self._turn:
            while self._leaving:
                self._engine.cancel(self._leaving[0])
                self._leaving.popleft()
            if not first.is_over():
                try:
                    self._stepping = threading.get_ident()
                    with inference_mode():
                        self._engine.step()
                finally:
                    self._stepping = None
            for one in list(self._line):
                one.over = one.over or one.is_over()
        self._notify()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


_Engines = WeakValueDictionary[Hashable, SharedEngine]
_OPEN: WeakKeyDictionary[Model, _Engines] = WeakKeyDictionary()
_OPENING = threading.Lock()


def shared_engine(model: Model, key: Hashable, opened: Callable[[], Engine]) -> SharedEngine:
    """The engine of the calls with this key that run on the model now; a new one without any.

    Only engines whose results do not depend on what is computed beside them are shared."""
    with _OPENING:
        engines = _OPEN.setdefault(model, WeakValueDictionary())
        found = engines.get(key)
        if found is None or found.is_stepping_here():
            engine = opened()
            found = SharedEngine(engine)
            if isinstance(engine.executor, NativeExecutor):
                engines[key] = found
        return found


def _forget() -> None:
    """A child has none of the threads that step in its parent, but may have their locks."""
    global _OPENING
    _OPEN.clear()
    _OPENING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def is_data(value: object) -> bool:
    """Whether a value consists of numbers, texts and configurations, and so runs no code of the
    caller's, which expects to run in the caller's thread."""
    if isinstance(value, Mapping):
        return all(map(is_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_data, value))
    return value is None or isinstance(value, bool | int | float | str) or is_configuration(value)
