"""`es.chat`: the answer to a conversation, whole or as it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Unpack, final, overload

from torch import nn

from everystep.api.many import generate
from everystep.api.many import stream as stream_of
from everystep.api.model import LanguageModel, paired
from everystep.config.kinds import FLAG
from everystep.dialogue.asked import Message
from everystep.dialogue.parsed import ToolCall
from everystep.drivers.stream import Stream
from everystep.errors import RequestError, shown
from everystep.requests.door import lists_options
from everystep.requests.prompts import Messages, TokenizerLike, is_messages
from everystep.types import Event

if TYPE_CHECKING:
    from everystep.requests.keywords import TextOptions

_OF_DIALOGUE = (
    *("tools", "tool_choice", "parallel_tool_calls", "enable_thinking", "thinking_budget"),
)
_SEVERAL = ("num_return_sequences", "return_dict_in_generate", "options", "on_error")
"""Keywords of `generate` that lead to something else than one text."""


@final
class ChatAnswer(str):
    """The text of an answer, with the calls and thoughts that belong to it.

    `tool_calls`: in their order; `reasoning_content`: what was thought before, None where nothing
    was. Both are told apart where the call has `tools`, `enable_thinking` or `thinking_budget`.
    """

    _message: Message | None = None

    @classmethod
    def of(cls, message: Message) -> ChatAnswer:
        """Return the answer that a message is."""
        made = cls(message.content)
        made._message = message
        return made

    @property
    def message(self) -> Message:
        """The answer in its parts."""
        return Message(str(self)) if self._message is None else self._message

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools, in their order."""
        return self.message.tool_calls

    @property
    def reasoning_content(self) -> str | None:
        """The text of what was thought before the answer."""
        return self.message.reasoning_content


@overload
def chat(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike,
    messages: str | Mapping[str, object] | Messages,
    *,
    stream: Literal[False] = False,
    seed: int | None = None,
    **options: Unpack[TextOptions],
) -> ChatAnswer: ...


@overload
def chat(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike,
    messages: str | Mapping[str, object] | Messages,
    *,
    stream: Literal[True],
    seed: int | None = None,
    **options: Unpack[TextOptions],
) -> Stream[Event]: ...


@lists_options("texts")
def chat(
    model: LanguageModel | nn.Module,
    tokenizer: TokenizerLike,
    messages: str | Mapping[str, object] | Messages,
    *,
    stream: bool = False,
    seed: int | None = None,
    **options: Unpack[TextOptions],
) -> ChatAnswer | Stream[Event]:
    """Return the answer to a conversation, of up to 512 new tokens unless `options` say more.

    `messages`: what the user says, one message, or all of them in turn. Whatever its form, it goes
    through the chat template. Where neither the options nor the model's generation config say how
    tokens are chosen, they are drawn at temperature 0.7 from the best of mass 0.9; the default
    model answers greedily, and its conversations begin with a system message
    (`model.chat_defaults`). Messages get the same answer from `es.generate` and every other call.
    `stream`: the events of the answer are returned, as by `es.stream`. `seed`: as for `generate`.

    With `tools`, `enable_thinking` or `thinking_budget` the answer is what is said, and calls and
    thoughts are its attributes; what a stream shows has the marks of both, for
    `everystep.dialogue.Parser`.

    Example:

        >>> answer = es.chat(model, tokenizer, "Name a colour.", max_new_tokens=8)
        >>> for event in es.chat(model, tokenizer, "Name two.", max_new_tokens=8, stream=True):
        ...     text = event.text
    """
    model = paired(model, tokenizer)
    FLAG.checked(stream, "stream")
    config = options.get("generation_config")
    asked = {name: options.get(name, getattr(config, name, None)) for name in _SEVERAL}
    neutral = {"num_return_sequences": 1, "return_dict_in_generate": False, "on_error": "raise"}
    several = [name for name in _SEVERAL if asked[name] not in (None, neutral.get(name))]
    if several:
        do = f"Leave {several[0]} out, or call es.generate with the messages"
        raise RequestError("chat gives one answer, as text", got=", ".join(several), do=do)
    said = {"role": "user", "content": messages} if isinstance(messages, str) else messages
    turns = [said] if isinstance(said, Mapping) else said
    if not is_messages(turns) or not all(isinstance(turn, Mapping) for turn in turns):
        raise RequestError(
            "this is no conversation",
            wanted="a text, a message, or a list of messages {'role': ..., 'content': ...}",
            got=shown(messages)[:80],
            do="Pass one conversation; for several, or for ids, call es.generate",
        )
    if stream:
        return stream_of(model, tokenizer, turns, seed=seed, **options)
    if all(options.get(name) is None for name in _OF_DIALOGUE):
        return ChatAnswer(generate(model, tokenizer, turns, seed=seed, **options))
    for name in ("logprobs", "prompt_logprobs"):
        if options.get(name) is not None:
            do = f"Leave {name} out, or call es.generate with return_dict_in_generate=True"
            raise RequestError(f"{name} is no part of a chat's answer", do=do)
    options["return_dict_in_generate"] = True
    whole = generate(model, tokenizer, turns, seed=seed, **options)
    return ChatAnswer.of(whole.message)
