"""`everystep chat`: a conversation, answer by answer.

Ctrl-C ends an answer and leaves the chat; what was said until then stays in the conversation. A
line that starts with a slash is a command, with two slashes a message that starts with one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import typer

import everystep as es
from everystep.cli import options as o
from everystep.cli.conversation import Conversation, obey
from everystep.cli.interrupts import Interrupts
from everystep.cli.lines import is_dialogue, piped_lines, typed_lines
from everystep.cli.loading import load
from everystep.cli.terminal import note, write, write_line
from everystep.errors import CapacityError, EverystepError, RequestError, message
from everystep.files.sources import DEFAULT_MODEL

LONGEST_ANSWER = 1024


def chat(
    context: typer.Context,
    system: o.System = None,
    max_new_tokens: o.MaxNewTokens = LONGEST_ANSWER,
    do_sample: o.DoSample = None,
    temperature: o.Temperature = None,
    top_k: o.TopK = None,
    top_p: o.TopP = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    repetition_penalty: o.RepetitionPenalty = None,
    stop: o.Stop = None,
    model: o.Model = DEFAULT_MODEL,
    dtype: o.DtypeOption = None,
    quantize: o.Quantize = None,
    cache_dtype: o.CacheDtypeOption = None,
    device: o.Device = "cpu",
    offline: o.Offline = False,
) -> None:
    """Talk to a model; /help shows what can be said beside messages.

    Ctrl-C stops an answer, Ctrl-D or /exit ends the chat. From a pipe, each line is a message.
    """
    decoding = o.DecodingOptions(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_strings=stop or None,
    )
    decoding.check()
    offline = offline or context.obj.offline
    choice = o.ModelChoice(model, dtype, device, offline, quantize, cache_dtype)
    partner = _partner(choice, decoding, seed)
    act = _talk if is_dialogue() else _recite
    act(partner, Conversation(system))


@dataclass(frozen=True)
class Partner:
    """The model, and how it is to answer."""

    model: Any
    tokenizer: Any
    decoding: o.DecodingOptions
    seed: int | None

    def stream(self, conversation: Conversation) -> Any:
        """The answer as events; CapacityError if the conversation has become too long for one."""
        messages = conversation.messages()
        seed = None if self.seed is None else self.seed + len(conversation.turns) // 2
        arguments = self._fitting(messages).arguments()
        return es.stream(self.model, self.tokenizer, messages, seed=seed, **arguments)

    def _fitting(self, messages: list[dict[str, str]]) -> o.DecodingOptions:
        """The decoding, its length cut to what the model's context leaves."""
        if self.model.context is None:
            return self.decoding
        ids = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        room = self.model.context - len(ids)
        if room <= 0:
            raise CapacityError(
                message(
                    "the conversation has become longer than the model's context",
                    wanted=f"fewer than {self.model.context} tokens",
                    got=len(ids),
                    do="/clear starts anew, /save FILE keeps what was said",
                )
            )
        return replace(self.decoding, max_new_tokens=min(room, self.decoding.max_new_tokens))


def _partner(choice: o.ModelChoice, decoding: o.DecodingOptions, seed: int | None) -> Partner:
    model, tokenizer = load(choice)
    if tokenizer.chat_template is None:
        raise RequestError(
            message(
                f"{choice.source} cannot chat",
                wanted="a model with a chat template",
                do="Take an instruct model, or use `everystep generate --raw`",
            )
        )
    return Partner(model, tokenizer, decoding, seed)


def _talk(partner: Partner, conversation: Conversation) -> None:
    """The dialogue with a person."""
    note("/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
    with Interrupts() as interrupts:
        for line in typed_lines(interrupts):
            _forgiven_turn(partner, conversation, line, interrupts)
            if conversation.ended:
                return


def _recite(partner: Partner, conversation: Conversation) -> None:
    """The answers to the lines of a pipe; the first failure ends it, as in any script."""
    for line in piped_lines():
        _turn(partner, conversation, line, None)
        if conversation.ended:
            return


def _forgiven_turn(
    partner: Partner, conversation: Conversation, line: str, interrupts: Interrupts
) -> None:
    """A turn after which the chat goes on, whatever becomes of it."""
    try:
        _turn(partner, conversation, line, interrupts)
    except (EverystepError, OSError) as error:
        conversation.take_back()
        note(str(error))


def _turn(
    partner: Partner, conversation: Conversation, line: str, interrupts: Interrupts | None
) -> None:
    """A line is obeyed if it is a command, answered if it says something."""
    if line.startswith("/") and not line.startswith("//"):
        if reply := obey(conversation, line.rstrip()):
            note(reply)
        return
    text = line.removeprefix("/") if line.startswith("//") else line
    if text.strip():
        conversation.ask(text)
        conversation.answer(_answer(partner, conversation, interrupts))


def _answer(partner: Partner, conversation: Conversation, interrupts: Interrupts | None) -> str:
    """Streams an answer and returns what came of it until it ended or was stopped."""
    pieces: list[str] = []
    try:
        with partner.stream(conversation) as stream:
            for event in stream:
                pieces.append(event.text or "")
                write(pieces[-1])
                if interrupts is not None and interrupts.wished:
                    break
    except KeyboardInterrupt:
        if interrupts is None:
            raise
    text = "".join(pieces)
    if not text.endswith("\n"):
        write_line()
    if interrupts is not None and interrupts.wished:
        note("stopped")
    return text
