"""What is said to a chat with a slash, beside messages to the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from everystep.cli.chat_settings import change, shown_settings
from everystep.cli.conversation import Conversation
from everystep.cli.questions import Message
from everystep.cli.user_input import Interrupts
from everystep.errors import FormatError, RequestError, nearest
from everystep.files.atomic import write_atomic
from everystep.files.opening import expanded, read_bounded
from everystep.files.strict_json import MAX_JSON_BYTES, parse_list


def obey(conversation: Conversation, line: str, interrupts: Interrupts | None) -> list[str]:
    """Do what a line that starts with a slash says, and return the lines to show."""
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        do = f"Perhaps /{close} is meant" if close else "/help shows the commands"
        raise RequestError(f"there is no command /{name}", do=do)
    return COMMANDS[name].act(conversation, rest.strip(), interrupts)


Act = Callable[[Conversation, str, Interrupts | None], list[str]]


class Command(NamedTuple):
    """A command: what it does, and how /help puts it."""

    act: Act
    what: str


def _set(conversation: Conversation, rest: str, interrupts: Interrupts | None) -> list[str]:
    name, _, value = rest.partition(" ")
    if name:
        change(conversation, name, value.strip())
    return shown_settings(conversation, name)


def _retry(conversation: Conversation, rest: str, interrupts: Interrupts | None) -> list[str]:
    conversation.ask_again(interrupts)
    return []


def _undo(conversation: Conversation, *unused: object) -> list[str]:
    question, _ = conversation.take_back()
    return [f"taken back: {_beginning(question['content'])}"]


def _clear(conversation: Conversation, *unused: object) -> list[str]:
    conversation.turns.clear()
    return ["the conversation starts anew"]


def _system(conversation: Conversation, rest: str, interrupts: Interrupts | None) -> list[str]:
    if rest:
        conversation.system = rest
        return ["the system message is set"]
    return [f"system message: {conversation.system or 'none'}"]


def _save(conversation: Conversation, rest: str, interrupts: Interrupts | None) -> list[str]:
    """Save the messages to a file as JSON; raise RequestError if another's file is there."""
    place = _place("save", rest)
    if place.exists() and place not in conversation.saved:
        raise RequestError(f"{Path(rest)} exists already", do="Give another name")
    messages = conversation.messages()
    text = json.dumps(messages, indent=2, ensure_ascii=False)
    write_atomic(place, f"{text}\n".encode())
    conversation.saved.add(place)
    return [f"saved {len(messages)} messages in {rest}"]


def _load(conversation: Conversation, rest: str, interrupts: Interrupts | None) -> list[str]:
    """Load the conversation of a file that /save wrote; raise FormatError if it holds another."""
    place = _place("load", rest)
    messages = read_messages(place)
    first = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    usual = conversation.model.chat_defaults.system
    conversation.system = usual if first is None else first
    conversation.turns = messages if first is None else messages[1:]
    conversation.saved.add(place)
    return [f"loaded {len(messages)} messages from {rest}"]


def read_messages(file: Path) -> list[Message]:
    """Read the messages of a file: perhaps a system message, then questions, each with its answer.

    Raise MissingFileError or FormatError where it is not there, too large, or holds something else.
    """
    found = parse_list(read_bounded(file, MAX_JSON_BYTES), str(file))
    messages = [_message(one, number, file) for number, one in enumerate(found)]
    roles = [one["role"] for one in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise FormatError(
            f"{file} holds no conversation",
            wanted="a system message or none, then user and assistant in turn",
            got=", ".join(roles),
        )
    return messages


def _message(value: object, number: int, file: Path) -> Message:
    if (
        not isinstance(value, dict)
        or value.keys() != {"role", "content"}
        or not all(isinstance(one, str) for one in value.values())
    ):
        raise FormatError(
            f"{file}: message {number} is none",
            wanted='{"role": "user", "content": "a text"} or the like',
            got=value,
        )
    return value


def _place(command: str, rest: str) -> Path:
    if not rest:
        do = f"For instance /{command} talk.json"
        raise RequestError(f"/{command} needs the name of a file", do=do)
    return expanded(rest).absolute()


def _beginning(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def _help(*unused: object) -> list[str]:
    return [
        *(f"/{name} {one.what}" for name, one in COMMANDS.items()),
        "a line that ends in \\ goes on in the next one; what stands between two lines of"
        ' """ is one message; // begins a message with a slash',
    ]


def _exit(conversation: Conversation, *unused: object) -> list[str]:
    conversation.ended = True
    return []


COMMANDS = {
    "set": Command(_set, "NAME VALUE changes how answers are found; alone, shows it"),
    "system": Command(_system, "TEXT sets the system message; alone, shows it"),
    "retry": Command(_retry, "answers the last question once more"),
    "undo": Command(_undo, "takes the last question and its answer back"),
    "clear": Command(_clear, "forgets what was said"),
    "save": Command(_save, "FILE writes the conversation as JSON"),
    "load": Command(_load, "FILE continues a saved conversation"),
    "help": Command(_help, "shows this"),
    "exit": Command(_exit, "ends the chat, as Ctrl-D does"),
}
