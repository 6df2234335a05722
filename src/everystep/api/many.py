"""Text in, text out: `generate` over any number of prompts, and `stream`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, Generic, Literal, TypeVar, Unpack, cast, overload

from torch import nn

from everystep.api.described import lists_options
from everystep.api.generated import Results
from everystep.api.keywords import PlainTextOptions, RectangleOptions, TextOptions
from everystep.api.model import LanguageModel
from everystep.api.pairs import paired
from everystep.api.progress import progress_bar
from everystep.api.prompts import Tokenizing
from everystep.api.session import (
    Generated,
    OptionsLike,
    PromptLike,
    Session,
    TokenizerLike,
    listed,
)
from everystep.config.kinds import FLAG, one_of
from everystep.errors import RequestError, shown
from everystep.streamers import BeamEvent, Wording, beam_event
from everystep.types import Event, FinishReason, Group

E = TypeVar("E", bound=Event | BeamEvent, covariant=True)


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: Tokenizing,
    prompts: str | Mapping[str, Any],
    *,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise"] = "raise",
    progress: bool = False,
    return_dict_in_generate: Literal[False] = False,
    **common: Unpack[PlainTextOptions],
) -> str: ...


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: str | Mapping[str, Any],
    *,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise"] = "raise",
    progress: bool = False,
    return_dict_in_generate: Literal[True],
    **common: Unpack[PlainTextOptions],
) -> Generated: ...


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: Tokenizing,
    prompts: list[str] | tuple[str, ...],
    *,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise"] = "raise",
    progress: bool = False,
    return_dict_in_generate: Literal[False] = False,
    **common: Unpack[PlainTextOptions],
) -> list[str]: ...


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: list[str] | tuple[str, ...],
    *,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    progress: bool = False,
    return_dict_in_generate: Literal[True],
    **common: Unpack[PlainTextOptions],
) -> list[Generated]: ...


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: PromptLike | Iterable[PromptLike],
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    progress: bool = False,
    **common: Unpack[TextOptions],
) -> Any: ...


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    prompts: None = None,
    **common: Unpack[RectangleOptions],
) -> Any: ...


@lists_options(TextOptions)
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None = None,
    prompts: PromptLike | Iterable[PromptLike] | None = None,
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    on_error: Literal["raise", "return"] = "raise",
    progress: bool = False,
    **common: Any,  # the overloads say which
) -> Any:
    """The continuation of one prompt, or of each of many.

    A prompt is a text, a list of ids, or a list of messages (which goes through the chat template).
    One gives a text; several give a list in their order, a few dozen in memory at once. `options`:
    for each prompt a mapping or a `GenerationConfig` of what holds for it instead of the keywords.
    `seed`: one integer, from which each prompt gets its own, or one per prompt of a list; a
    prompt's tokens do not depend on the others. With `num_return_sequences` above 1 a prompt gives
    a list; with `return_dict_in_generate=True` each text is a `Generated`.

    A prompt that fails does not affect the others. `on_error="return"` puts a `Generated` in its
    place whose reason is the error; "raise" raises the first error when all others have ended, with
    all of that in its attribute `results`. `progress`: whether a bar shows how many have ended.
    Without prompts this is `model.generate(**common)`.

    Example:

        >>> text = es.generate(model, tokenizer, "The capital of France is", max_new_tokens=8)
    """
    model = paired(model, tokenizer)
    if not one_of("raise", "return").accepts(on_error):
        raise RequestError(
            "on_error is impossible", wanted="'raise' or 'return'", got=shown(on_error)
        )
    if prompts is None:
        if options is not None or on_error == "return":
            raise RequestError(
                "options and on_error are for prompts", got="none", do="Pass prompts"
            )
        return model.generate(seed=seed, tokenizer=tokenizer, **common)
    many, single = listed(prompts)
    session = Session(model, tokenizer, many, options, seed, common)
    results: dict[int, Any] = {}
    errors: dict[int, Exception] = {}
    bar = progress_bar(progress, many, "prompts")
    # Closed here: other threads may use its engine, and its prompts leave that now.
    with bar as advance, closing(session.run(many)) as running:
        for index, result, error in running:
            results[index] = result
            if error is not None:
                errors[index] = error
            advance()
    every = Results(results[index] for index in range(len(results)))
    if errors and on_error == "raise":
        first = min(errors)
        if not single:
            errors[first].add_note(f"This was prompt {first}.")
            errors[first].results = every  # type: ignore[attr-defined]
        raise errors[first]
    return every[0] if single else every


@overload
def stream(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    beam_events: Literal[False] = False,
    **common: Unpack[TextOptions],
) -> Stream[Event]: ...


@overload
def stream(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    beam_events: bool,
    **common: Unpack[TextOptions],
) -> Stream[Event | BeamEvent]: ...


@lists_options(TextOptions)
def stream(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    beam_events: bool = False,
    **common: Unpack[TextOptions],
) -> Stream[Any]:
    """The events of a text, of messages, or of a list of either, token by token.

    `options`, `seed`: as for `generate`. `beam_events`: the live beams of every step are shown
    too, as `BeamEvent`. A prompt that fails while it runs has its error as the reason of its last
    event; the others go on.

    Example:

        >>> for event in es.stream(model, tokenizer, "Once", max_new_tokens=3):
        ...     text = event.text
    """
    model = paired(model, tokenizer)
    FLAG.checked(beam_events, "beam_events")
    many = list(listed(prompts)[0])
    if not many:
        raise RequestError("there is no prompt to stream", do="Pass at least one")
    session = Session(model, tokenizer, many, options, seed, common, gives_events=True)
    return Stream(session, many, beam_events=beam_events)


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
