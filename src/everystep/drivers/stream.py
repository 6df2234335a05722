"""Events of one or several prompts, as they happen."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar, cast

from everystep.drivers.session import (
    Generated,
    PromptLike,
    Session,
)
from everystep.streamers import BeamEvent, Wording, beam_event
from everystep.types import Event, FinishReason, Group

E = TypeVar("E", bound=Event | BeamEvent, covariant=True)


class Stream(Generic[E]):
    """Events of one or several prompts, as they happen.

    Iterating drives the engine; nothing runs between two events. Tokens of beams come when every
    possible result begins with them; with `beam_events` a `BeamEvent` per request and step shows
    the live beams after them. `cancel()` ends every prompt with the tokens it has (their last
    events say so), `close()` ends them silently.

    Several threads may read, cancel and close: each event goes to one reader, and a step is over
    before anything else happens. An interrupt loses no event: what was produced comes next.
    """

    def __init__(
        self, session: Session, prompts: Sequence[PromptLike], *, beam_events: bool = False
    ) -> None:
        self._session = session
        self._wording = Wording(session.tokenizer)
        self._beam_events = beam_events
        self._lock = threading.RLock()
        self._stepping: int | None = None  # the thread that runs a step
        self._ending: Literal["cancel", "close"] | None = None  # asked for, not done yet
        self._reported: list[Event] = []  # by the engine, without text
        self._events: deque[Event | BeamEvent] = deque()
        self.groups = [self._submit(prompt, i) for i, prompt in enumerate(prompts)]

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

    def cancel(self) -> None:
        """Every prompt ends here; the last event of each has the reason `cancelled`."""
        self._end("cancel")

    def close(self) -> None:
        """Every prompt ends here, and there are no more events."""
        self._end("close")

    def results(self) -> list[list[Generated]]:
        """What every prompt that has ended became, in the order of the prompts."""
        return [self._session.generated(group) for group in self.groups]

    def __enter__(self) -> Stream[E]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, prompt: PromptLike, index: int) -> Group:
        try:
            group = self._session.submit(prompt, index)
        except Exception as error:
            error.add_note(f"This was prompt {index}.")
            raise
        if (trim := self._session.trim(group)) is not None:
            self._wording.trim(group.request.request_id, *trim)
        return group

    def _produce(self) -> bool:
        """Steps until there is an event; False if none will come."""
        with self._lock:
            self._word()
            while not self._events:
                if self._ending is not None:
                    self._finish(self._ending)
                elif self._session.engine.pending:
                    self._step()
                else:
                    break
            return bool(self._events)

    def _step(self) -> None:
        self._stepping = threading.get_ident()
        try:
            self._reported.extend(self._session.step())
        finally:
            self._stepping = None
        for event in self._reported:
            if event.finish is not None and not self.groups[int(event.request_id)].live:
                self._session.note_cut(self.groups[int(event.request_id)], depth=5)
        self._word()
        if self._beam_events:
            table, live = self._session.engine.table, [g for g in self.groups if g.live]
            beamed = (g for g in live if g.opened and not g.request.strategy.streams)
            self._events.extend(beam_event(group, table, self._wording) for group in beamed)

    def _word(self) -> None:
        """What the engine reported has its text and may be taken; cut short, it is done again."""
        if not self._reported:
            return
        after = self._wording.copy()
        worded = [after(event) for event in self._reported]
        # One line: an interrupt comes before all of it, or after.
        self._wording, self._reported, _ = after, [], self._events.extend(worded)  # type: ignore[func-returns-value]

    def _end(self, how: Literal["cancel", "close"]) -> None:
        """Every prompt ends here, or after the step, if the step is what asks for it."""
        # Written down before the lock is taken: a reader who takes it again and again could keep
        # it from us for as long as there are events, and sees this before his next step.
        self._ending = how
        if self._stepping != threading.get_ident():
            with self._lock:
                self._finish(how)

    def _finish(self, how: Literal["cancel", "close"]) -> None:
        for group in self.groups:
            if group.live:
                reason = FinishReason("cancelled")
                self._reported.extend(self._session.engine.cancel(group, reason))
        self._word()
        if how == "close":
            self._events.clear()
        self._ending = None
