"""One engine for everybody: prompts of any event loop and thread, submitted while it runs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from typing import Any, Unpack
from warnings import warn

from torch import nn

from everystep.api.model import LanguageModel, paired
from everystep.drivers.engine_thread import EngineThread, Submission
from everystep.drivers.session import (
    KEPT,
    Generated,
    PromptLike,
    Session,
    TokenizerLike,
    listed,
)
from everystep.engine import Continuous, Reuse
from everystep.errors import RequestError, shown
from everystep.requests.keywords import PromptOptions, lists_options
from everystep.requests.reading import require_output_object
from everystep.types import Event


class AsyncEngine:
    """One engine for many users: `stream` and `generate` for one prompt each, at any time.

    A thread of its own runs the steps; it begins with the first prompt. Prompts come from any event
    loop and any thread and share its steps; the tokens of each are those of `everystep.stream` with
    the same seed, whatever runs beside it. `max_rows`: cache rows in use at once, one per prompt or
    per beam. `token_budget`: positions fed per step. `max_positions`: cached positions in use at
    once, or None; beyond it the youngest prompts give theirs up and feed them again later.
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
        scheduler = Continuous(token_budget, max_rows, max_positions, reuse=Reuse(KEPT))
        self._model, self._max_rows = paired(model, tokenizer), max_rows
        self._session = Session(
            self._model,
            tokenizer,
            (),
            None,
            None,
            {},
            gives_events=True,
            scheduler=scheduler,
        )
        self._thread = EngineThread(self._session, scheduler, max_waiting)
        self._max_events = max_events
        weakref.finalize(self, self._thread.close).atexit = False

    def __repr__(self) -> str:
        state = "closed" if self._thread.closed else "open"
        return f"AsyncEngine({self._model!r}, at most {self._max_rows} rows, {state})"

    @lists_options(PromptOptions)
    def stream(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> AsyncStream:
        """The events of one prompt, for `async for`; it is in line when this returns.

        `options`: the keywords of `everystep.stream`, `seed` among them. RequestError for options
        that are impossible, CapacityError if `max_waiting` prompts wait; what is wrong with the
        prompt itself is raised where the first event is awaited.
        """
        return AsyncStream(self, self._submit(prompt, options, self._max_events))

    @lists_options(PromptOptions)
    async def generate(self, prompt: PromptLike, **options: Unpack[PromptOptions]) -> Any:
        """What `everystep.generate` gives for this prompt; ends the prompt if it is cancelled."""
        one = self._submit(prompt, options, None)
        try:
            while not one.over:
                await one.news()
        finally:
            self._thread.leave(one)
        if one.error is not None:
            raise one.error
        return one.result

    async def close(self) -> None:
        """Takes no more prompts and ends those inside as cancelled; returns when the thread has
        ended and no row is held."""
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _submit(self, prompt: PromptLike, given: Mapping[str, Any], most: int | None) -> Submission:
        if not listed(prompt)[1]:
            raise RequestError(
                "this is not one prompt",
                wanted="a text, a list of ids or of messages, or a mapping",
                got=shown(prompt)[:60],
                do="Call it once for each prompt",
            )
        options = self._session.asked(given)
        if most is None:
            require_output_object(options)
        for notice in options.effective.notices:
            warn(notice, stacklevel=3)
        one = Submission(prompt, options, most)
        self._thread.submit(one)
        return one


class AsyncStream:
    """The events of one prompt of an `AsyncEngine`, each as `everystep.stream` gives it.

    One task reads. Leaving ends the prompt and frees its rows: `aclose`, the end of an
    `async with`, a cancelled task, or dropping the stream, as `break` does in an `async for` over a
    stream that has no other name. A prompt that fails while it runs has its error as the reason of
    its last event.
    """

    def __init__(self, engine: AsyncEngine, one: Submission) -> None:
        self._engine = engine  # which is open as long as anybody reads
        self._thread = engine._thread
        self._one = one

    def __repr__(self) -> str:
        state = "ended" if self._one.over else "under way"
        return f"AsyncStream({state}, {len(self._one.events)} waiting)"

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Event:
        self._thread.require_here()
        one = self._one
        while True:
            over = one.over  # asked first, since the last event comes before it
            if one.events and not one.left:
                event = one.events.popleft()
                self._thread.make_room(one)
                return event
            if over or one.left:
                break
            try:
                await one.news()
            except asyncio.CancelledError:
                self._thread.leave(one)
                raise
        error, one.error = one.error, None
        if error is not None:
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """The prompt is over and holds no row; there are no more events."""
        one = self._one
        self._thread.leave(one)
        one.events.clear()
        while not one.over:
            await one.news()
            one.events.clear()

    def results(self) -> list[Generated]:
        """What the prompt became, once the last event is there; nothing before."""
        return list(self._one.result or ())

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._thread.leave(self._one)


def _require_positive(limits: Mapping[str, int]) -> None:
    """RequestError for a limit that is not a positive integer."""
    for name, value in limits.items():
        if type(value) is not int or value < 1:
            wanted = "an integer of at least 1"
            raise RequestError(f"{name} is impossible", wanted=wanted, got=shown(value))
