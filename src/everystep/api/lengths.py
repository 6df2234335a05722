"""How far a call may go: `max_*`, `min_*` and the model's context, counted in one way.

A prompt's positions count once, whether they are ids, embeddings or both; padding counts with them,
as it stands in the rectangle that is returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from warnings import warn

from everystep.api.inputs import Inputs
from everystep.config import Effective
from everystep.errors import CapacityError, RequestError, message

DEFAULT_NEW = 20


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a row may go: `visible` ids in all, pad prefix included, and `new` tokens of it.

    `reach`: as `visible`, or what a longer criterion of the caller's allows.
    """

    visible: int
    new: int
    reach: int

    @property
    def most(self) -> int:
        """The most new tokens a row can get."""
        return self.new + self.reach - self.visible


def read_limits(effective: Effective, inputs: Inputs, context: int | None, own: int = 0) -> Limits:
    """The most ids a row may have, and that no minimum of the caller's lies beyond it.

    `max_new_tokens` wins over `max_length`; without either, 20 new tokens, or as many as the
    model's context leaves. `own`: the limit of a criterion of the caller's. RequestError where
    nothing is left.
    """
    new = _most_new(effective, inputs.prompt_width, context)
    _check_least(effective, inputs.prompt_width, new)
    visible = inputs.width + new
    return Limits(visible, new, max(visible, own))


def settled(effective: Effective, inputs: Inputs, limits: Limits, pad: int | None) -> Effective:
    """The values that came to hold: the whole length, and the pad id where an end id serves."""
    by = "max_length" if effective.max_new_tokens is None else "max_new_tokens"
    length = inputs.prompt_width + limits.new
    found = effective.replaced(effective.source(by), max_length=length)
    if effective.pad_token_id is not None or pad is None:
        return found
    return found.replaced(effective.source("eos_token_id"), pad_token_id=pad)


def refuse_beyond(prompt: int, context: int | None) -> None:
    """CapacityError if a prompt of so many positions leaves no room in the model's context."""
    if context is not None and prompt >= context:
        raise CapacityError(
            message(
                "the prompt fills the model's context",
                wanted=f"fewer than {context} tokens",
                got=prompt,
                do="Shorten the prompt, or take a model with a longer context",
            )
        )


def context_notices(
    effective: Effective, inputs: Inputs, limits: Limits, context: int | None
) -> tuple[str, ...]:
    """What to tell a caller whose own limit lies beyond the model's context."""
    name = "max_length" if effective.max_new_tokens is None else "max_new_tokens"
    if context is None or name not in effective.caller:
        return ()
    if inputs.total_width + limits.new - 1 <= context:  # the last token is not fed
        return ()
    text = message(
        f"{name}={effective[name]} leads beyond what the model was made for",
        wanted=f"at most {context} positions",
        got=f"{inputs.total_width} of the prompt and up to {limits.new} new ones",
        do=f"Lower {name}, or expect the text to get worse there",
    )
    return (text,)


def _most_new(effective: Effective, prompt: int, context: int | None) -> int:
    if effective.max_new_tokens is not None:
        return int(effective.max_new_tokens)
    if effective.source("max_length") != "default" and effective.max_length is not None:
        new = int(effective.max_length) - prompt
        if new <= 0:
            raise RequestError(
                message(
                    "the prompt leaves no room for new tokens",
                    wanted=f"a prompt shorter than max_length={effective.max_length}",
                    got=f"{prompt} positions",
                    do="Raise max_length, or set max_new_tokens instead",
                )
            )
        return new
    new = DEFAULT_NEW if context is None else min(DEFAULT_NEW, context - prompt)
    if new <= 0:
        raise RequestError(
            message(
                "the prompt fills the model's context",
                wanted=f"fewer than {context} positions, or max_new_tokens",
                got=f"{prompt} positions",
                do="Shorten the prompt, or set max_new_tokens",
            )
        )
    return new


def _check_least(effective: Effective, prompt: int, new: int) -> None:
    """A minimum beyond the maximum: an error if the caller set both, a warning if the minimum."""
    name = "min_length" if effective.min_new_tokens is None else "min_new_tokens"
    least = int(effective[name] or 0) - (prompt if name == "min_length" else 0)
    if least <= new or name not in effective.caller:
        return
    most = "max_length" if effective.max_new_tokens is None else "max_new_tokens"
    text = message(
        f"{name}={effective[name]} cannot be reached behind a prompt of {prompt} positions",
        wanted=f"at most {new + (prompt if name == 'min_length' else 0)}",
        got=f"{most}={effective[most]} ({effective.source(most)})",
        do=f"Lower {name} or raise {most}",
    )
    if most in effective.caller:
        raise RequestError(text)
    warn(text, UserWarning, stacklevel=6)
