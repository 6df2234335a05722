"""Events of one or several prompts, as they happen."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Generic, TypeVar, cast

from everystep.drivers.driver import Driver, Mailbox, reopen_after_fork
from everystep.drivers.generated import Generated
from everystep.drivers.session import Session
from everystep.requests.prompts import PromptLike
from everystep.streamers import BeamEvent, Wording, beam_event
from everystep.types import Event, Group

E = TypeVar("E", bound=Event | BeamEvent, covariant=True)
_AHEAD = 64
"""Events that may wait for a reader, while the steps of others move his prompts on too."""


class Stream(Generic[E]):
    """Events of one or several prompts, as they happen.

    Iterating takes the steps. Streams and calls of one model share them, so that a step of one
    moves the others on too, as far as 64 events that nobody has read. Tokens of beams come when
    every possible result begins with them; with `beam_events` a `BeamEvent` per request and step
    shows the live beams after them, and such a stream shares no steps. `cancel()` ends every prompt
    with the tokens it has (their last events say so), `close()` ends them silently.

    Several threads may read, cancel and close: each event goes to one reader, and a step is over
    before anything else happens. An interrupt loses no event: what was produced comes next.
    """

    def __init__(
        self, session: Session, prompts: Sequence[PromptLike], *, beam_events: bool = False
    ) -> None:
        self._session, self._prompts = session, prompts
        self._wording = Wording(session.tokenizer)
        self._beam_events = beam_events
        self.open_locks()
        reopen_after_fork(self)
        self._closed = False
        self._reported: deque[Event] = deque()  # by the engine, without text
        self._events: deque[Event | BeamEvent] = deque()
        self._inside: list[tuple[Driver, Mailbox]] = []
        self._turn = 0  # whose, where several engines have prompts of it
        weakref.finalize(self, _leave, self._inside).atexit = False
        most = _AHEAD * len(prompts)
        for index, prompt in enumerate(prompts):
            try:
                request = session.request(prompt, index)
                inside = session.submit(request, events=self._reported, most=most)
            except Exception as error:
                _leave(self._inside)
                error.add_note(f"This was prompt {index}.")
                raise
            self._inside.append(inside)
            session.reply(index).spell(self._wording, request)

    def open_locks(self) -> None:
        """Make the lock anew, as a forked child needs it."""
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        live = sum(bool(group.live) for group in self.groups)
        prompts = f"{len(self.groups)} prompt{'s' * (len(self.groups) != 1)}"
        return f"Stream({prompts}, {live} under way, {len(self._events)} waiting)"

    def __iter__(self) -> Stream[E]:
        return self

    def __next__(self) -> E:
        # What is taken is returned in one line, so that an interrupt finds it taken or not.
        while True:
            try:
                return cast(E, self._events.popleft())
            except IndexError:
                if not self._produce():
                    raise StopIteration from None

    @property
    def groups(self) -> list[Group]:
        """The groups of the prompts, in their order."""
        return [group for _, box in self._inside for group in box.groups]

    def cancel(self) -> None:
        """End every prompt here; the last event of each has the reason `cancelled`."""
        self._end()

    def close(self) -> None:
        """End every prompt here; there are no more events."""
        self._closed = True
        self._end()

    def results(self) -> list[list[Generated]]:
        """Return what every prompt that has ended became, in the order of the prompts."""
        ask, known = self._session, enumerate(zip(self._prompts, self.groups, strict=True))
        return [ask.reply(i, ask.again(asked, i)).generated(one) for i, (asked, one) in known]

    def __enter__(self) -> Stream[E]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> bool:
        """Take steps until there is an event; return False if none will come."""
        with self._lock:
            self._word()
            while not self._events and not self._over:
                self._advance()
                self._word()
            return bool(self._events)

    @property
    def _over(self) -> bool:
        return not self._reported and all(box.over for _, box in self._inside)

    def _advance(self) -> None:
        """Wait until something of a prompt was reported, or is over."""
        live = [(driver, box) for driver, box in self._inside if not box.over]
        for driver, box in live:
            driver.take_back(box)
        drivers = list({driver: None for driver, _ in live})
        if not drivers:
            return
        driver = drivers[self._turn % len(drivers)]
        self._turn += 1
        if not self._beam_events:
            own = [box for one, box in live if one is driver]
            driver.step_until(lambda: bool(self._reported) or any(box.over for box in own))
            return
        driver.step()
        self._word()
        with driver.alone() as engine:
            beamed = [g for g in self.groups if g.live and g.opened]
            for group in (g for g in beamed if not g.request.strategy.streams):
                self._events.append(beam_event(group, engine.table, self._wording))

    def _word(self) -> None:
        """Give what the engine reported its text, so that it may be taken; cut short, it is done
        again."""
        count, after = len(self._reported), self._wording.copy()
        if not count:
            return
        worded = [after(self._reported[i]) for i in range(count)]
        for event in worded:
            index = int(event.request_id)
            if event.finish is not None and self._inside[index][1].over:
                self._session.note_cut(index, self.groups[index], depth=5)
        add, take, raw = self._events.append, deque.popleft, self._reported
        # One line: an interrupt comes before all of it, or after.
        self._wording, _ = after, deque(chain(map(add, worded), map(take, repeat(raw, count))), 0)
        if self._closed:
            self._events.clear()

    def _end(self) -> None:
        """End every prompt, or after the step, if the step is what asks for it."""
        _leave(self._inside)
        if not any(driver.is_stepping_here() for driver, _ in self._inside):
            for driver, box in self._inside:
                driver.step_until(lambda box=box: box.over)  # type: ignore[misc]
        if self._closed:
            self._reported.clear()
            self._events.clear()


def _leave(inside: list[tuple[Driver, Mailbox]]) -> None:
    for driver, box in inside:
        if not box.over:
            driver.leave(box)
