"""The processes of a model in parts as the first one leads them: started, told, waited for, ended.

After any error in a step they meet again before the next one. One that has ended or does not come
is started again, where this process started it, and loads its part again; then no executor has rows
any more. Under torchrun nothing starts it again, and the model is lost.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar, final

from torch import Tensor

from everystep.adapters import Adapter
from everystep.errors import RankError, RequestError
from everystep.executors.parallel.group import (
    OVER,
    RankGroup,
    Store,
    call_for,
    failure,
    file_store,
    readiness,
)
from everystep.executors.parallel.rank_messages import Message, adapter_form, to_message

T = TypeVar("T")
_LOADING = 1800.0
"""The seconds that a process may take to start and to load its part."""
_GLANCE = 0.02
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from everystep.executors.parallel.part_loading import main; main()"
)
_PLACE = str(Path(__file__).absolute().parents[3])
"""Where this package is imported from, which may be relative to another working directory."""


@dataclass(eq=False)
class RankProcesses:
    """The other processes, where this one starts them; `orders`: what they are to load.

    `folder`: where they meet.
    """

    orders: Mapping[str, Any]
    folder: Path
    owner: int = field(default_factory=os.getpid)
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, number: int, meeting: int) -> None:
        """Start the process of this number, which comes to the meeting."""
        orders = {**self.orders, "number": number, "meeting": meeting, "parent": self.owner}
        # In a session of its own Ctrl-C in the terminal does not reach it.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, _PLACE],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.running[number] = process
        if process.stdin is not None:
            with suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(json.dumps(orders).encode())

    def end_of(self, number: int) -> str | None:
        """Return how a process has ended, None while it runs."""
        code = self.running[number].poll()
        if code is None:
            return None
        return f"it was ended by signal {-code}" if code < 0 else f"it ended with status {code}"

    def kill(self, number: int) -> None:
        """End a process, also one that is stopped."""
        self.running[number].kill()
        self.running[number].wait()

    def end(self) -> None:
        """End all of them."""
        if os.getpid() != self.owner:
            return
        for number in self.running:
            self.kill(number)
        shutil.rmtree(self.folder, ignore_errors=True)


@final
class Crew:
    """The processes of one model, led by this one: steps are taken by all, one after another.

    `group`: how this one reaches them. `generation`: how often one of them has lost its rows.
    """

    def __init__(self, group: RankGroup, children: RankProcesses | None) -> None:
        self.group = group
        self.generation = 0
        self._children = children
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._numbers = iter(range(1, sys.maxsize))
        self._over: str | None = None
        self._calling = False
        self._gone: list[int] = []
        self._known: weakref.WeakKeyDictionary[Adapter, int] = weakref.WeakKeyDictionary()
        self._new: dict[int, Message] = {}
        self._end = weakref.finalize(self, _end, group.store, children, self._owner)

    @classmethod
    def of_children(cls, count: int, patience: float, orders: Mapping[str, Any]) -> Crew:
        """Return one whose other processes are started now, and load while this one does."""
        folder = Path(tempfile.mkdtemp(prefix="everystep-"))
        place = folder / "store"
        children = RankProcesses({**orders, "store": str(place), "count": count}, folder)
        crew = cls(RankGroup(0, count, file_store(place), patience, here=True), children)
        for number in range(1, count):
            children.start(number, 1)
        return crew

    @property
    def count(self) -> int:
        """The number of processes, this one included."""
        return self.group.count

    def number(self) -> int:
        """Return a number that no executor of the crew has had."""
        return next(self._numbers)

    def forget(self, number: int) -> None:
        """Let the others drop the executor of this number, with the next thing that they are
        told."""
        self._gone.append(number)

    def known(self, adapter: Adapter) -> int:
        """Return the number by which the others know an adapter, which they learn with the next
        thing that they are told."""
        found = self._known.get(adapter)
        if found is None:
            found = self._known[adapter] = adapter.number
            self._new[found] = adapter_form(adapter)
            weakref.finalize(adapter, self._gone.append, -found - 1)
        return found

    def step(self, told: Callable[[], Message], own: Callable[[], T]) -> T:
        """Tell the others what is `told`, do one's `own` part, and return what comes of it.

        An error or an interrupt is one of this call; after it all meet again. Raise RankError where
        another process failed, has ended or does not answer.
        """
        self._require_owner()
        with self._lock:
            self._gather()
            group = self.group
            gone: list[int] = []
            try:
                with group.stepping():
                    message = told()
                    gone, self._gone[:] = self._gone[:], []
                    new, self._new = self._new, {}
                    group.send(to_message({**message, "gone": gone, "new": new}))
                    return own()
            except RankError as error:
                why = self._why()
                self._leave(gone)
                raise RankError(
                    "a process that holds a part of the model was lost in this step",
                    wanted=f"{self.count} processes",
                    got=why or error,
                    do="Call again: what still runs is fed again from its ids"
                    if self._children is not None
                    else "Call again, and start all processes again where that fails too",
                ) from error
            except BaseException:
                self._leave(gone)
                raise

    def _leave(self, gone: list[int]) -> None:
        """Leave the others, of which nobody knows what they have heard: they are told again what
        they should know and forget."""
        self.group.leave()
        self._gone[:0] = gone
        self._know_nothing()

    def ready(self) -> None:
        """Meet the others, where that is due; RankError where one of them is lost for good."""
        self._require_owner()
        with self._lock:
            self._gather()

    def _gather(self) -> None:
        if self._over is not None:
            self._refuse(self._over)
        if self.group.met:
            return
        if not self._calling:  # else an interrupt came after the others were called
            self.group.meeting += 1
            self._calling = True
        meeting = self.group.meeting
        first = meeting == 1
        self.group.note(call_for(meeting), "1")
        others = range(1, self.count)
        patience = self.group.patience or _LOADING
        late = self._wait(list(others), meeting, _LOADING if first else patience)
        if late and (self._children is None or first):
            self.close(f"process {late[0]} of {self.count} {self._state(late[0], meeting)}")
            self._refuse(self._over or "")
        if late and self._children is not None:
            self.generation += 1
            self._know_nothing()
            for number in late:
                self._children.kill(number)
                self._children.start(number, meeting)
            if still := self._wait(late, meeting, _LOADING):
                self.close(f"process {still[0]} {self._state(still[0], meeting)}")
                self._refuse(self._over or "")
        self._calling = False
        self.group.meet(meeting)

    def _know_nothing(self) -> None:
        """Let adapters be told anew, since a process may know none."""
        self._new = {number: adapter_form(one) for one, number in list(self._known.items())}

    def _wait(self, numbers: list[int], meeting: int, seconds: float) -> list[int]:
        """Return those of the processes that do not come within so many seconds, at once where
        they cannot come any more."""
        until, left = time.monotonic() + seconds, numbers
        while True:
            left = [n for n in left if self.group.noted(readiness(n, meeting)) is None]
            ended = all(self._fate(n, meeting) for n in left)
            if ended or time.monotonic() > until:
                return left
            time.sleep(_GLANCE)

    def _why(self) -> str | None:
        """Return what became of a process that was lost in a step."""
        until = time.monotonic() + 1
        while True:  # one that has just ended may be seen a moment later
            for number in range(1, self.count):
                if (why := self._fate(number, self.group.meeting)) is not None:
                    return f"process {number}: {why}"
            if time.monotonic() > until:
                return None
            time.sleep(_GLANCE)

    def _fate(self, number: int, meeting: int) -> str | None:
        said = self.group.noted(failure(number, meeting))
        if said is None and self._children is not None:
            return self._children.end_of(number)
        return said

    def _state(self, number: int, meeting: int) -> str:
        return self._fate(number, meeting) or "does not answer"

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RequestError(
                "the processes of a model in parts follow the process that loaded it",
                wanted=f"process {self._owner}",
                got=f"process {os.getpid()}, which was forked from it",
                do="Load the model there too",
            )

    def _refuse(self, why: str) -> NoReturn:
        raise RankError(
            "a model in parts has lost a process for good",
            wanted=f"{self.count} processes",
            got=why,
            do="Load the model again",
        )

    def read_out(self, states: Tensor, own: Callable[[Tensor], Tensor]) -> Tensor:
        """Return (n, V) logits of hidden states (n, E) after the last norm."""
        return self.step(lambda: {"do": "read out", "states": states}, lambda: own(states))

    def close(self, why: str = "it was closed") -> None:
        """End the other processes; what still asks for them gets a RankError."""
        self._over = self._over or why
        self.group.leave()
        self._end()


def _end(store: Store, children: RankProcesses | None, owner: int) -> None:
    if os.getpid() != owner:
        return
    with suppress(RuntimeError):
        store.set(OVER, "1")
    if children is not None:
        children.end()
