"""Text in, text out: `generate` over any number of prompts, and `stream`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from torch import nn

from everystep.api.model import LanguageModel, paired
from everystep.api.open import taken_again
from everystep.config.kinds import FLAG, one_of
from everystep.drivers.generated import Generated, Results
from everystep.drivers.session import OptionsLike, Session
from everystep.drivers.stream import Stream
from everystep.errors import RequestError, shown
from everystep.requests.door import lists_options
from everystep.requests.prompts import PromptLike, TokenizerLike, Tokenizing, listed
from everystep.shown import progress_bar
from everystep.streamers import BeamEvent
from everystep.types import Event

if TYPE_CHECKING:
    from everystep.requests.keywords import PlainTextOptions, RectangleOptions, TextOptions


@overload
def generate(
    model: LanguageModel | nn.Module,
    tokenizer: Tokenizing,
    prompts: str | Mapping[str, object],
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
    prompts: str | Mapping[str, object],
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


@lists_options("texts")
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
    """Return the continuation of one prompt, or of each of many.

    A prompt is a text, a list of ids, or a list of messages, which is answered as by `es.chat`. One
    gives a text; several give a list in their order, a few dozen in memory at once. `options`:
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
    model = model.gathered(to_step=True)
    explains = partial(taken_again, model, tokenizer)
    asked = model, tokenizer, many, options, seed, common
    session = Session(*asked, gives_layers=True, explains=explains)
    results: dict[int, object] = {}
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


@lists_options("texts")
def stream(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike | None,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    options: Sequence[OptionsLike] | None = None,
    seed: int | Sequence[int] | None = None,
    beam_events: bool = False,
    **common: Unpack[TextOptions],
) -> Stream[Event | BeamEvent]:
    """Return the events of a text, of messages, or of a list of either, token by token.

    Messages are answered as by `es.chat`. `options`, `seed`: as for `generate`. `beam_events`: the
    live beams of every step are shown too, as `BeamEvent`. A prompt that fails while it runs has
    its error as the reason of its last event; the others go on.

    Example:

        >>> for event in es.stream(model, tokenizer, "Once", max_new_tokens=3):
        ...     text = event.text
    """
    model = paired(model, tokenizer)
    FLAG.checked(beam_events, "beam_events")
    many = list(listed(prompts)[0])
    if not many:
        raise RequestError("there is no prompt to stream", do="Pass at least one")
    explains = partial(taken_again, model, tokenizer)
    asked = model, tokenizer, many, options, seed, common
    shares = not beam_events
    session = Session(*asked, gives_events=True, shares=shares, explains=explains)
    return Stream(session, many, beam_events=beam_events)
