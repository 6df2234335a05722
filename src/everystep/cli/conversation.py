"""A conversation: what was said so far, and what a slash command makes of it.

Knows no model and no terminal. A system message, if there is one, stands first and survives
`clear`; a question that got no answer is taken back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from everystep.errors import RequestError, message, nearest
from everystep.files.atomic import write_atomic

Message = dict[str, str]


@dataclass
class Conversation:
    """Turns of user and assistant; `ended` once the user wants to leave."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    ended: bool = False
    _saved: set[Path] = field(default_factory=set)

    def messages(self) -> list[Message]:
        """Everything a chat template is to see, in order."""
        start = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*start, *self.turns]

    def ask(self, text: str) -> None:
        """The user has said something."""
        self.turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """The assistant has answered; without any text the question is taken back."""
        if text:
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.take_back()

    def take_back(self) -> None:
        """The last question was not asked."""
        if self.turns and self.turns[-1]["role"] == "user":
            self.turns.pop()

    def save(self, path: Path) -> None:
        """The messages are in `path` as JSON; RequestError if another's file is there."""
        place = path.expanduser().absolute()
        if place.exists() and place not in self._saved:
            raise RequestError(message(f"{path} exists already", do="Give another name"))
        text = json.dumps(self.messages(), indent=2, ensure_ascii=False)
        write_atomic(place, f"{text}\n".encode())
        self._saved.add(place)


def obey(conversation: Conversation, line: str) -> str:
    """Does what a line that starts with a slash says, and returns the answer to the user."""
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        close = nearest(name, COMMANDS)
        do = f"Perhaps /{close} is meant" if close else "/help shows the commands"
        raise RequestError(message(f"there is no command /{name}", do=do))
    command, _ = COMMANDS[name]
    return command(conversation, rest.strip())


def _exit(conversation: Conversation, rest: str) -> str:
    conversation.ended = True
    return ""


def _clear(conversation: Conversation, rest: str) -> str:
    conversation.turns.clear()
    return "the conversation starts anew"


def _save(conversation: Conversation, rest: str) -> str:
    if not rest:
        raise RequestError(
            message("/save needs the name of a file", do="For instance /save a.json")
        )
    conversation.save(Path(rest))
    return f"saved {len(conversation.messages())} messages in {rest}"


def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = rest
        return "the system message is set"
    return f"system message: {conversation.system or 'none'}"


def _help(conversation: Conversation, rest: str) -> str:
    return "; ".join(f"/{name} {what}" for name, (_, what) in COMMANDS.items())


COMMANDS: dict[str, tuple[Callable[[Conversation, str], str], str]] = {
    "clear": (_clear, "forgets what was said"),
    "save": (_save, "FILE writes the conversation as JSON"),
    "system": (_system, "TEXT sets the system message, without TEXT shows it"),
    "help": (_help, "shows this"),
    "exit": (_exit, "ends the chat, as Ctrl-D does"),
}
"""Name -> what it does, and how /help puts it."""
