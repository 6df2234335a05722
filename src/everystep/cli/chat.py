"""`everystep chat`: a conversation, answer by answer.

Ctrl-C ends an answer and leaves the chat; what was said until then stays in the conversation. A
line that starts with a slash is a command, with two slashes a message that starts with one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

import everystep as es
from everystep.cli import options as o
from everystep.cli.loading import load
from everystep.cli.reading import Interrupts, piped_lines, typed_lines
from everystep.cli.terminal import is_terminal, note, write, write_line
from everystep.errors import CapacityError, EverystepError, RequestError, nearest
from everystep.files.atomic import write_atomic
from everystep.files.opening import expanded
from everystep.files.sources import DEFAULT_MODEL

Message = dict[str, str]


def chat(
    context: typer.Context,
    system: o.System = None,
    max_new_tokens: o.MaxNewTokens = 1024,
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
    decoding = o.decoding(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop_strings=stop or None,
    )
    offline = offline or context.obj
    loaded, tokenizer = load(model, dtype, quantize, cache_dtype, device, offline)
    if tokenizer.chat_template is None:
        do = "Take an instruct model, or use `everystep generate --raw`"
        raise RequestError(f"{model} cannot chat", wanted="a model with a chat template", do=do)
    o.note_seed(loaded, decoding, seed)
    act = _talk if is_terminal(sys.stdin) and is_terminal(sys.stdout) else _recite
    act(Conversation(loaded, tokenizer, decoding, seed, system))


@dataclass
class Conversation:
    """What was said so far, to which model, and how it is to answer; `ended` once the user wants
    to leave. The system message, if there is one, stands first and survives /clear."""

    model: Any
    tokenizer: Any
    decoding: dict[str, Any]
    seed: int | None
    system: str | None
    turns: list[Message] = field(default_factory=list)
    ended: bool = False
    saved: set[Path] = field(default_factory=set)

    def messages(self) -> list[Message]:
        """Everything a chat template is to see, in order."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self.turns]

    def stream(self, question: Message) -> Any:
        """The answer as events; CapacityError if the conversation has become too long for one."""
        messages = [*self.messages(), question]
        seed = None if self.seed is None else self.seed + len(self.turns) // 2
        arguments = {**self.decoding, "max_new_tokens": self._room(messages)}
        return es.stream(self.model, self.tokenizer, messages, seed=seed, **arguments)

    def _room(self, messages: list[Message]) -> int:
        """The most new tokens: as many as were asked for and the model's context leaves."""
        asked: int = self.decoding["max_new_tokens"]
        if self.model.context is None:
            return asked
        ids = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        room: int = self.model.context - len(ids)
        if room <= 0:
            raise CapacityError(
                "the conversation has become longer than the model's context",
                wanted=f"fewer than {self.model.context} tokens",
                got=len(ids),
                do="/clear starts anew, /save FILE keeps what was said",
            )
        return min(room, asked)


def _talk(conversation: Conversation) -> None:
    """The dialogue with a person, which goes on whatever becomes of a turn."""
    note("/help shows the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
    with Interrupts() as interrupts:
        for line in typed_lines(interrupts):
            try:
                _turn(conversation, line, interrupts)
            except (EverystepError, OSError) as error:
                note(str(error))
            if conversation.ended:
                return


def _recite(conversation: Conversation) -> None:
    """The answers to the lines of a pipe; the first failure ends it, as in any script."""
    for line in piped_lines():
        _turn(conversation, line, None)
        if conversation.ended:
            return


def _turn(conversation: Conversation, line: str, interrupts: Interrupts | None) -> None:
    """A line is obeyed if it is a command, answered if it says something.

    A question that gets no answer was not asked.
    """
    if line.startswith("/") and not line.startswith("//"):
        if reply := _obey(conversation, line.rstrip()):
            note(reply)
        return
    text = line.removeprefix("/") if line.startswith("//") else line
    if not text.strip():
        return
    question = {"role": "user", "content": text}
    if answer := _answer(conversation, question, interrupts):
        conversation.turns += [question, {"role": "assistant", "content": answer}]


def _answer(conversation: Conversation, question: Message, interrupts: Interrupts | None) -> str:
    """Streams an answer and returns what came of it until it ended or was stopped."""
    pieces: list[str] = []
    try:
        with conversation.stream(question) as stream:
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


# --- what is said with a slash --------------------------------------------------------------------


def _obey(conversation: Conversation, line: str) -> str:
    """Does what a line that starts with a slash says, and returns the answer to the user."""
    name, _, rest = line[1:].partition(" ")
    if name not in _COMMANDS:
        close = nearest(name, _COMMANDS)
        do = f"Perhaps /{close} is meant" if close else "/help shows the commands"
        raise RequestError(f"there is no command /{name}", do=do)
    command, _ = _COMMANDS[name]
    return command(conversation, rest.strip())


def _exit(conversation: Conversation, rest: str) -> str:
    conversation.ended = True
    return ""


def _clear(conversation: Conversation, rest: str) -> str:
    conversation.turns.clear()
    return "the conversation starts anew"


def _save(conversation: Conversation, rest: str) -> str:
    """The messages are in a file as JSON; RequestError if another's file is there."""
    if not rest:
        raise RequestError("/save needs the name of a file", do="For instance /save a.json")
    place = expanded(rest).absolute()
    if place.exists() and place not in conversation.saved:
        raise RequestError(f"{Path(rest)} exists already", do="Give another name")
    messages = conversation.messages()
    text = json.dumps(messages, indent=2, ensure_ascii=False)
    write_atomic(place, f"{text}\n".encode())
    conversation.saved.add(place)
    return f"saved {len(messages)} messages in {rest}"


def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = rest
        return "the system message is set"
    return f"system message: {conversation.system or 'none'}"


def _help(conversation: Conversation, rest: str) -> str:
    return "; ".join(f"/{name} {what}" for name, (_, what) in _COMMANDS.items())


_COMMANDS: dict[str, tuple[Callable[[Conversation, str], str], str]] = {
    "clear": (_clear, "forgets what was said"),
    "save": (_save, "FILE writes the conversation as JSON"),
    "system": (_system, "TEXT sets the system message, without TEXT shows it"),
    "help": (_help, "shows this"),
    "exit": (_exit, "ends the chat, as Ctrl-D does"),
}
"""Name -> what it does, and how /help puts it."""
