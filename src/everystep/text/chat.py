"""Which chat template is used, and what of the tokenizer it sees; templates run in `template`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everystep.errors import (
    RequestError,
    TokenizerError,
    UnknownArgumentError,
    UnsupportedError,
    message,
    nearest,
)
from everystep.text.template import ChatTemplate


def chosen_template(
    own: str | Mapping[str, str] | None, asked: str | None, tools: object
) -> ChatTemplate:
    """The template to use: the one asked for by name or as source, else the tokenizer's own.

    Of several named ones, `tool_use` serves requests with tools and `default` the others.
    """
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if asked is not None:
        return ChatTemplate(named.get(asked, asked))
    if tools is not None and "tool_use" in named:
        return ChatTemplate(named["tool_use"])
    if "default" in named:
        return ChatTemplate(named["default"])
    raise TokenizerError(
        message(
            "There is no chat template to use",
            wanted="tokenizer.chat_template" if not named else "the name of one",
            got=", ".join(named) or "a tokenizer without any (a base model's, perhaps)",
            do="Pass chat_template=..., or give the prompt as text",
        )
    )


def checked_tools(tools: Sequence[Any] | None) -> Sequence[Mapping[str, Any]] | None:
    """The tools themselves; RequestError unless each is a JSON schema."""
    for tool in tools or ():
        if not isinstance(tool, Mapping):
            raise RequestError(
                message("A tool is given by its JSON schema", wanted="a dict", got=repr(tool)[:200])
            )
    return tools


def refuse_unread(
    template: ChatTemplate,
    variables: Mapping[str, object],
    given: Mapping[str, object],
    call: Callable[..., Any],
) -> None:
    """Raises for what the template would ignore: a variable, or one of `given` that is not None."""
    for name, value in given.items():
        if value is not None and name not in template.reads:
            raise UnsupportedError(message(f"The chat template does not read {name}"))
    if "messages" in variables:
        raise UnknownArgumentError(message("The messages are the first argument"))
    for name in variables:
        if name not in template.reads:
            known = {*template.reads, *inspect.signature(call).parameters}
            raise UnknownArgumentError(
                message(
                    f"{name!r} is neither an argument nor a variable that the chat template reads",
                    wanted=f"perhaps {near!r}" if (near := nearest(name, known)) else None,
                )
            )


def tokens_within(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """1 for each token whose characters, given by `offsets`, touch one of the spans, else 0."""
    mask = []
    index = 0
    for start, end in offsets:
        # Both run from left to right, so a span that ends before this token is done with.
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        mask.append(int(index < len(spans) and end > spans[index][0] and end > start))
    return mask
