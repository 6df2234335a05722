"""Text in, text out: `generate` over any number of prompts, `stream`, and `chat`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from everystep.api.model import LanguageModel
from everystep.api.resolve import read_seeds, require_output_object
from everystep.api.session import (
    Generated,
    Messages,
    PromptLike,
    Session,
    Stream,
    is_one,
    run_all,
)
from everystep.errors import RequestError, message
from everystep.text import Tokenizer
from everystep.types import Group


def generate(
    model: LanguageModel,
    tokenizer: Tokenizer | None = None,
    prompts: PromptLike | Iterable[PromptLike] | None = None,
    *,
    seed: int | Sequence[int] | None = None,
    progress: bool = False,
    **options: Any,
) -> Any:
    """The continuation of one prompt, or of each of many.

    A prompt is a text, a list of ids, or a list of messages (which goes through the chat template).
    One prompt gives a text; several give a list of texts in their order, from the continuous
    scheduler, with no more than a few dozen in memory at once. `seed`: one integer, or one per
    prompt of a list; a prompt's tokens do not depend on the others. With `num_return_sequences`
    above 1 each prompt gives a list; with `return_dict_in_generate=True` each text is a
    `Generated`.
    Without prompts this is `model.generate(**options)`.
    """
    if prompts is None:
        return model.generate(seed=seed, tokenizer=tokenizer, **options)
    returned = options.get("return_dict_in_generate")
    require_output_object(options.get("logprobs"), options.get("prompt_logprobs"), returned)
    single = is_one(prompts)
    many: Iterable[PromptLike] = [prompts] if single else prompts  # type: ignore[list-item, assignment]
    session = Session(model, tokenizer, options, _seeds(seed, many))
    results: dict[int, Any] = {}
    with _bar(progress, many) as advance:

        def done(index: int, group: Group) -> None:
            results[index] = _shape(session.generated(group), options, tokenizer)
            advance()

        run_all(session, many, done)
    if single:
        return results[0]
    return [results[index] for index in range(len(results))]


def stream(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    prompts: PromptLike | Sequence[PromptLike],
    *,
    seed: int | Sequence[int] | None = None,
    beam_events: bool = False,
    **options: Any,
) -> Stream:
    """The events of a text, of messages, or of a list of either, token by token.

    `seed`: one integer, or one per prompt. `beam_events`: the live beams of every step are shown
    too, as `BeamEvent`.
    """
    many = [prompts] if is_one(prompts) else list(prompts)
    if not many:
        raise RequestError(message("there is no prompt to stream", do="Pass at least one"))
    session = Session(model, tokenizer, options, _seeds(seed, many))
    return Stream(session, tokenizer, many, beam_events=beam_events)  # type: ignore[arg-type]


def chat(
    model: LanguageModel,
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    seed: int | None = None,
    **options: Any,
) -> str:
    """The assistant's answer to a conversation; up to 512 new tokens unless told otherwise."""
    if "max_length" not in options:
        options.setdefault("max_new_tokens", 512)
    return str(generate(model, tokenizer, messages, seed=seed, **options))


def _seeds(seed: Any, prompts: Iterable[Any]) -> int | tuple[int, ...] | None:
    """One seed for all prompts, one for each of them, or none."""
    if seed is None or type(seed) is int:
        return seed
    if not isinstance(prompts, Sized):
        raise RequestError(
            message(
                "prompts that come one by one cannot have a seed each",
                wanted="one integer, or prompts in a list",
                got=f"seed={seed!r}",
                do="Pass list(prompts), or one seed",
            )
        )
    return read_seeds(seed, len(prompts))


def _shape(generated: list[Generated], options: dict[str, Any], tokenizer: Any) -> Any:
    asked = bool(options.get("return_dict_in_generate"))
    values: list[Any] = (
        list(generated)
        if asked
        else [one.text if tokenizer is not None else list(one.tokens) for one in generated]
    )
    return values[0] if len(values) == 1 else values


def _bar(progress: bool, many: Any) -> AbstractContextManager[Callable[[], None]]:
    if not progress:
        return nullcontext(lambda: None)
    from everystep.api.progress import ProgressBar

    return ProgressBar(len(many) if isinstance(many, (list, tuple)) else None)
