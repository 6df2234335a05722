"""Chat templates: messages in, the prompt's text out, as the model was trained to read it.

The semantics are those of transformers (`render_jinja_template`, 5.23), with two differences:
a rendering is bounded in time and size, and an error names the line of the template. The text
already holds every special token, so none are added when it is turned into ids.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from everystep.errors import (
    RequestError,
    TokenizerError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.text.cage import CagedProgram
from everystep.text.known_templates import KNOWN_TEMPLATES
from everystep.text.rendering import CompiledTemplate, Rendering, WrongTemplate
from everystep.text.sandbox import GENERATION_END, GENERATION_START, TemplateLimits
from everystep.text.tool_schemas import tool_schemas

# Appended to the message that is to be continued, to find the place where it ends in the text.
# The space shows whether the template trims messages.
CONTINUATION = "\ufdd2 "
DEFAULT_LIMITS = TemplateLimits()
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """The text of a chat, and the (start, end) of what `{% generation %}` blocks enclose."""

    text: str
    generations: tuple[tuple[int, int], ...] = ()

    def replaced(self, edits: Sequence[tuple[int, int, str]]) -> RenderedChat:
        """Return the chat with other text in some places, (start, end, text) from left to right."""
        pieces, grown, total, last = list[str](), [0], 0, 0
        for start, end, text in edits:
            pieces += [self.text[last:start], text]
            total, last = total + len(text) - (end - start), end
            grown.append(total)
        ends = [end for _, end, _ in edits]

        def moved(place: int) -> int:
            return place + grown[bisect_right(ends, place)]

        spans = tuple((moved(start), moved(end)) for start, end in self.generations)
        return RenderedChat("".join([*pieces, self.text[last:]]), spans)


class ChatTemplate:
    """A compiled chat template; TokenizerError if the source is not one.

    `reads` holds the names that the template takes from the call. A source that is not among the
    `KNOWN_TEMPLATES` is compiled and rendered in a process of its own.
    """

    def __init__(self, source: str, limits: TemplateLimits = DEFAULT_LIMITS) -> None:
        self.source = source
        self.limits = limits
        self._program = _compiled(source, limits)
        self.reads = self._program.reads

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render the chat; RequestError: refused by the template; TokenizerError: it fails.

        `continue_final_message` ends the text within the last message, in its `content` or the
        field named. A function among the `tools` stands for its JSON schema. `variables` are
        further names that the template may use.
        """
        _refuse_other_ends(continue_final_message)
        chat = [_message(each) for each in messages]
        field = "content" if continue_final_message is True else continue_final_message
        expected = _mark_continuation(chat, field, self.source) if field else ""
        names = {
            **plain(dict(variables or {})),
            "messages": chat,
            "tools": plain(tool_schemas(tools)),
            "documents": plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        # The end of a generation block may stand behind the end of what is to be continued.
        whole = _without_marks(*self._run(names))
        return _cut_at_continuation(whole, expected) if field else whole

    def _run(self, names: Mapping[str, Any]) -> tuple[str, int]:
        """Return the text as the template prints it, and how many generation blocks it passed."""
        answer = self._program.run(names)
        if answer.refused is not None:
            raise RequestError("The chat template refuses these messages", got=answer.refused)
        if answer.what is not None:
            raise _failure(answer)
        return answer.text, answer.generations


def _refuse_other_ends(continue_final_message: object) -> None:
    if not isinstance(continue_final_message, bool | str):
        wanted, got = "True, False or the name of a field", shown(continue_final_message)
        raise RequestError("continue_final_message is unknown", wanted=wanted, got=got)


@functools.lru_cache(maxsize=16)
def _compiled(source: str, limits: TemplateLimits) -> CompiledTemplate | CagedProgram:
    if len(source) > limits.source_characters:
        wanted = f"{limits.source_characters} characters"
        raise TokenizerError("The chat template is too long", wanted=wanted, got=len(source))
    checksum = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()
    try:
        return (CompiledTemplate if checksum in KNOWN_TEMPLATES else CagedProgram)(source, limits)
    except WrongTemplate as wrong:
        raise _failure(wrong.answer) from None


def _failure(answer: Rendering) -> TokenizerError:
    return TokenizerError(str(answer.what), got=answer.got, do=answer.do)


def plain(value: Any) -> Any:
    """Return the value rebuilt of plain JSON types; anything else becomes text that names its type.

    Objects have methods that a sandbox cannot know to be harmless, so none gets in. TokenizerError
    where it contains itself, or is nested as deep.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise endless() from None


def endless() -> TokenizerError:
    """Return the error of a message or variable that contains itself, or is nested as deep."""
    what = "a message or variable for the chat template is nested without end"
    return TokenizerError(what, do="Check that it does not contain itself")


def _plain(value: Any) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump())
    return f"<{type(value).__name__}>"


def _key(value: Any) -> Any:
    found = _plain(value)
    try:
        hash(found)
    except TypeError:  # an object that can be a key became one that cannot
        return f"<{type(value).__name__}>"
    return found


def _message(given: Any) -> dict[str, Any]:
    """Return a copy of a message without the keys that hold None, its reasoning under every
    name."""
    value = plain(given)
    if not isinstance(value, dict):
        raise RequestError(
            "A message is not an object", wanted="role and content", got=shown(given)[:200]
        )
    found = {key: item for key, item in value.items() if item is not None}
    reasoning = next((found[name] for name in REASONING_FIELDS if name in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _mark_continuation(chat: list[dict[str, Any]], field: str, source: str) -> str:
    """Appends the mark to the last message's field and returns the text before it."""
    if not chat or not isinstance(chat[-1].get(field), str | list | tuple):
        raise RequestError("There is nothing to continue", wanted=f"a last message with {field!r}")
    last = chat[-1]
    text = last[field]
    if not isinstance(text, str):
        block = next((part for part in reversed(text) if "text" in part), None)
        if block is None:
            raise RequestError("The last message has no text to continue")
        text, block["text"] = block["text"], block["text"] + CONTINUATION
        return str(text)
    # Reasoning is stored under several names; whichever the template reads carries the mark.
    fields = REASONING_FIELDS if field in REASONING_FIELDS else (field,)
    for name in fields:
        if last.get(name) == text:
            last[name] = text + CONTINUATION
    if not any(name in source for name in fields):
        raise RequestError(f"The chat template does not read {field!r}")
    return text


def _cut_at_continuation(chat: RenderedChat, expected: str) -> RenderedChat:
    text, mark = chat.text, CONTINUATION.strip()
    if mark not in text or expected.strip() not in text:
        raise RequestError(
            "The last message cannot be continued",
            wanted="a template that prints it unchanged",
            do="Pass the text of the prompt yourself instead of messages",
        )
    place = text.rindex(mark)
    if not text.startswith(CONTINUATION, place):
        place = len(text[:place].rstrip())
    spans = tuple((start, min(end, place)) for start, end in chat.generations if start < place)
    return RenderedChat(text[:place], spans)


def _without_marks(text: str, generations: int) -> RenderedChat:
    """Cuts the marks of generation blocks out of the text and keeps where they were."""
    if not generations:
        return RenderedChat(text)
    head, *parts = text.split(GENERATION_START)
    spans = []
    for part in parts:
        inside, end, after = part.partition(GENERATION_END)
        if not end or GENERATION_END in after:
            raise RequestError("A message holds U+FDD0 or U+FDD1, which are reserved")
        spans.append((len(head), len(head) + len(inside)))
        head += inside + after
    return RenderedChat(head, tuple(spans))


def chosen_template(
    own: str | Mapping[str, str] | None, asked: object, tools: object
) -> ChatTemplate:
    """Return the template to use: the one asked for by name or as source, else the tokenizer's own.

    Of several named ones, `tool_use` serves requests with tools and `default` the others.
    """
    named = {"default": own} if isinstance(own, str) else dict(own or {})
    if asked is not None and not isinstance(asked, str):
        wanted = "a template as text, or the name of one"
        raise TokenizerError("chat_template is none", wanted=wanted, got=shown(asked))
    if asked is not None:
        return ChatTemplate(named.get(asked, asked))
    name = "tool_use" if tools is not None and "tool_use" in named else "default"
    if name in named:
        return ChatTemplate(named[name])
    raise TokenizerError(
        "There is no chat template to use",
        wanted="tokenizer.chat_template" if not named else "the name of one",
        got=", ".join(named) or "a tokenizer without any (a base model's, perhaps)",
        do="Pass chat_template=..., or give the prompt as text",
    )


def refuse_open_end(continue_final_message: bool | str) -> None:
    """Raises for a last message that is to be continued, beside what reads or follows its end."""
    if continue_final_message:
        raise RequestError(
            "continue_final_message leaves the last message open",
            wanted="no add_generation_prompt and no return_assistant_tokens_mask with it",
        )


def refuse_unread(
    template: ChatTemplate,
    variables: Mapping[str, object],
    given: Mapping[str, object],
    call: Callable[..., Any],
) -> None:
    """Raises for what the template would ignore: a variable, or one of `given` that is not None."""
    for name, value in given.items():
        if value is not None and name not in template.reads:
            raise UnsupportedError(f"The chat template does not read {name}.")
    if "messages" in variables:
        raise UnknownArgumentError("The messages are the first argument.")
    for name in variables:
        if name not in template.reads:
            near = nearest(name, {*template.reads, *inspect.signature(call).parameters})
            raise UnknownArgumentError(
                f"{name!r} is neither an argument nor a variable that the chat template reads",
                wanted=f"perhaps {near!r}" if near else None,
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
