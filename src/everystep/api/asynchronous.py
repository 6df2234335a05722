"""One engine for everybody: prompts of any event loop and thread, submitted while it runs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack
from warnings import warn

from torch import nn

from everystep.api.model import LanguageModel, paired
from everystep.api.open import taken_again
from everystep.drivers.engine_thread import Desk, Submission, ended_early
from everystep.drivers.generated import Generated, Reply
from everystep.drivers.session import KEPT, Session
from everystep.engine import NO_REUSE, Continuous, Reuse
from everystep.engine.explained import Again
from everystep.errors import RequestError, shown
from everystep.models import Model
from everystep.processors.grammars.source import KINDS
from everystep.requests.door import lists_options
from everystep.requests.options import Options
from everystep.requests.prompts import PromptLike, TokenizerLike, listed
from everystep.requests.reading import require_output_object
from everystep.stops.ends import moment
from everystep.streamers import Wording
from everystep.types import Event

if TYPE_CHECKING:
    from everystep.requests.keywords import PromptOptions

_LONG_TO_READ = (*KINDS, "allowed_sequences")
"""Keywords whose values may take long to read, and so are read where prompts are."""


class AsyncEngine:
    """One engine for many users: `stream` and `generate` for one prompt each, at any time.

    A thread of its own runs the steps; it begins with the first prompt. Prompts come from any event
    loop and any thread and share its steps; the tokens of each are those of `everystep.stream` with
    the same seed, whatever runs beside it. They are read by further threads, so that a long one
    delays no step. `max_rows`: cache rows in use at once, one per prompt or per beam.
    `token_budget`: positions fed per step. `max_positions`: cached positions in use at once, or
    None; beyond it the youngest prompts give theirs up and feed them again later. Prompts that the
    native executor cannot run have an engine of their own on torch operators, with as many rows.
    `max_waiting`: prompts that have not begun; a further one is a `CapacityError`. None: any
    number. `max_events`: events that wait for a reader; a prompt with so many takes no part in
    steps until half of them are read.
    """

    def __init__(
        self,
        model: LanguageModel | nn.Module,
        tokenizer: TokenizerLike | None = None,
        *,
        max_rows: int = 32,
        token_budget: int = 1024,
        max_positions: int | None = None,
        max_waiting: int | None = 1024,
        max_events: int = 256,
    ) -> None:
        limits = {"max_rows": max_rows, "token_budget": token_budget, "max_events": max_events}
        optional = {"max_positions": max_positions, "max_waiting": max_waiting}
        _require_positive(limits | {name: n for name, n in optional.items() if n is not None})

        self._model, self._max_rows = paired(model, tokenizer), max_rows
        self._core = core = self._model.core
        reuse = NO_REUSE if isinstance(core, Model) and core.learns else Reuse(KEPT)

        def scheduler() -> Continuous:
            return Continuous(token_budget, max_rows, max_positions, reuse=reuse)

        asked, explains = (self._model, tokenizer, ()), partial(taken_again, self._model, tokenizer)
        self._session = Session(
            *asked, None, None, {}, gives_events=True, scheduler=scheduler, explains=explains
        )
        self._desk = Desk(self._session, max_waiting)
        self._max_events = max_events
        weakref.finalize(self, self._desk.close).atexit = False

    def __repr__(self) -> str:
        state = "closed" if self._desk.closed else "open"
        return f"AsyncEngine({self._model!r}, at most {self._max_rows} rows, {state})"

    @lists_options("texts")
    def stream(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> AsyncStream:
        """Return the events of one prompt, for `async for`; it is in line when this returns.

        `options`: the keywords of `everystep.stream`, `seed` among them. RequestError for options
        that are impossible, CapacityError if `max_waiting` prompts wait; what is wrong with the
        prompt itself, or with a grammar, is raised where the first event is awaited.
        """
        return AsyncStream(self, self._submit(prompt, options, self._max_events))

    @lists_options("texts")
    async def generate(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> Any:
        """Return what `everystep.generate` gives for this prompt; ends it if it is cancelled."""
        follower = self._submit(prompt, options, None)
        one = follower.one
        try:
            while not one.over:
                await follower.news()
        finally:
            one.leave()
        group = one.group()
        if any(done.reason.kind == "cancelled" for done in group.done):
            raise ended_early()
        if group.error is not None:
            raise group.error
        return follower.answer().shaped(group)

    async def close(self) -> None:
        """Take no more prompts and end those inside as cancelled; return when the thread has ended
        and no row is held. What had not begun is a RequestError where it is awaited."""
        await asyncio.to_thread(self._desk.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _submit(
        self, prompt: PromptLike, given: Mapping[str, object], most: int | None
    ) -> _Follower:
        if not listed(prompt)[1]:
            raise RequestError(
                "this is not one prompt",
                wanted="a text, a list of ids or of messages, or a mapping",
                got=shown(prompt)[:60],
                do="Call it once for each prompt",
            )
        if self._model.core is not self._core:
            raise RequestError(
                "the model has other weights than those that this engine was opened with",
                do="Open a new AsyncEngine after to(), merge_adapter() and requires_grad_()",
            )
        session, since = self._session, moment()

        def asked() -> Options:
            options = session.asked(prompt, given, since)
            if most is None:
                require_output_object(options.recording, options.effective)
            return options

        read = asked
        if all(given.get(name) is None for name in _LONG_TO_READ):
            options = asked()
            for notice in options.effective.notices:
                warn(notice, stacklevel=3)

            def read() -> Options:
                return options

        follower = _Follower()
        follower.one = self._desk.submit(prompt, read, follower.wake, most)
        follower.again = session.again(prompt, follower.one.number, given)
        return follower


class _Follower:
    """The one task that follows a submission, and how other threads wake it."""

    one: Submission
    again: Again | None

    def __init__(self) -> None:
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    @property
    def has_news(self) -> bool:
        """True where there is an event to read, or all is over."""
        return self.one.over or bool(self.one.box and self.one.box.events)

    async def news(self) -> None:
        """Return when there is an event to read or all is over, in the loop that runs."""
        if self._waiter is not None:
            raise RequestError(
                "two tasks read one stream", wanted="one reader", do="Make a stream for each"
            )
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiter = loop, waiter
        try:
            # Looked at after the waiter is set: what other threads add from now on wakes it.
            if not self.has_news:
                await waiter
        finally:
            self._waiter = None

    def answer(self) -> Reply:
        """Return how it is answered; raise what kept it from being read."""
        return replace(self.one.answer(), again=self.again)

    def wake(self) -> None:
        """Have the task look again, if there is anything to see; where its loop is closed, so that
        it never will, the prompt ends."""
        if (waiting := self._waiter) is None or not self.has_news:
            return
        loop, waiter = waiting
        try:
            loop.call_soon_threadsafe(_set, waiter)
        except RuntimeError:
            self.one.leave()


class AsyncStream:
    """The events of one prompt of an `AsyncEngine`, each as `everystep.stream` gives it.

    One task reads. Leaving ends the prompt and frees its rows: `aclose`, the end of an
    `async with`, a cancelled task, or dropping the stream, as `break` does in an `async for` over a
    stream that has no other name. A prompt that fails while it runs has its error as the reason of
    its last event.
    """

    def __init__(self, engine: AsyncEngine, follower: _Follower) -> None:
        self._engine = engine  # which is open as long as anybody reads
        self._follower = follower
        self._one = follower.one
        self._wording: Wording | None = None
        self._ended = False

    def __repr__(self) -> str:
        waiting = len(self._one.box.events) if self._one.box is not None else 0
        state = "ended" if self._one.over else "under way"
        return f"AsyncStream({state}, {waiting} waiting)"

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        self._engine._desk.require_here()
        while not self._ended:
            over = self._one.over  # asked first, since the last event comes before it
            if (box := self._one.box) is not None and box.events:
                return self._worded(box.events.popleft())
            if over or self._one.left:
                self._ended = True
                if not self._one.left:
                    self._one.group()  # which raises what kept it from beginning
                break
            try:
                await self._follower.news()
            except asyncio.CancelledError:
                self._one.leave()
                self._ended = True
                raise
        raise StopAsyncIteration

    def _worded(self, event: Event) -> Event:
        """Return the event with its text; an error of the tokenizer ends the prompt."""
        self._one.caught_up()
        if self._wording is None:
            self._wording = self._one.wording()
        try:
            return self._wording(event)
        except BaseException:
            self._ended = True
            self._one.leave()
            raise

    async def aclose(self) -> None:
        """End the prompt, which holds no row when this returns; there are no more events."""
        self._ended = True
        self._one.leave()
        while not self._one.over:
            if (box := self._one.box) is not None:
                box.events.clear()
            await self._follower.news()

    def results(self) -> list[Generated]:
        """Return what the prompt became, once the last event is there; nothing before."""
        one = self._one
        if one.box is None or not one.box.groups or not one.over:
            return []
        return self._follower.answer().generated(one.group())

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._one.leave()


def _set(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _require_positive(limits: Mapping[str, int]) -> None:
    """Raise RequestError for a limit that is not a positive integer."""
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            wanted = "an integer of at least 1"
            raise RequestError(f"{name} is impossible", wanted=wanted, got=shown(value))
