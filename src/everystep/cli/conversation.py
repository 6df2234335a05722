"""A conversation: what was said so far, to which model, and how it is to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import everystep as es
from everystep.cli.command_options import judged
from everystep.cli.questions import Message, system_message
from everystep.cli.terminal import AnswerText, note, write_line
from everystep.cli.user_input import Interrupts
from everystep.errors import OversizeError, RequestError

USUAL_LENGTH = 1024
"""The most new tokens of an answer where nobody says another number."""


@dataclass
class Conversation:
    """`said`: arguments of `generate()` that the user chose; `ended` once he wants to leave;
    `adapters`: the argument of `generate()` that names them, if there are any.

    The system message, if there is one, stands first and survives /clear.
    """

    model: Any
    tokenizer: Any
    said: Mapping[str, Any]
    seed: int | None
    system: str | None
    turns: list[Message] = field(default_factory=list)
    ended: bool = False
    saved: set[Path] = field(default_factory=set)
    asked: int = 0
    adapters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of `generate()` with which answers are found."""
        return judged(self.said)

    def messages(self) -> list[Message]:
        """Return everything a chat template is to see, in order."""
        return [*system_message(self.system), *self.turns]

    def ask(self, text: str, interrupts: Interrupts | None = None) -> None:
        """Show the answer, and make both part of the conversation.

        A question that gets no answer was not asked.
        """
        question = {"role": "user", "content": text}
        if answer := self._answer(question, interrupts):
            self.turns += [question, {"role": "assistant", "content": answer}]

    def ask_again(self, interrupts: Interrupts | None = None) -> None:
        """Give the last question another answer, or its old one where none comes.

        Raise RequestError if nothing was asked.
        """
        before = self.take_back()
        count = len(self.turns)
        try:
            self.ask(before[0]["content"], interrupts)
        finally:
            if len(self.turns) == count:
                self.turns += before

    def take_back(self) -> list[Message]:
        """Return the last question and its answer, which are no longer part of the conversation.

        Raise RequestError if nothing was asked.
        """
        if not self.turns:
            raise RequestError("nothing was asked yet", do="Ask something first")
        *self.turns, question, answer = self.turns
        return [question, answer]

    def _answer(self, question: Message, interrupts: Interrupts | None) -> str:
        """Show an answer and return what came of it until it ended or was stopped."""
        pieces: list[str] = []
        try:
            with self._stream(question) as stream, AnswerText() as shown:
                for event in stream:
                    pieces.append(event.text or "")
                    shown.write(pieces[-1])
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

    def _stream(self, question: Message) -> Any:
        """Return the answer as events.

        Raise OversizeError if the conversation is too long for one.
        """
        messages = [*self.messages(), question]
        # Every answer has draws of its own, also the second one to a question.
        seed = None if self.seed is None else self.seed + self.asked
        settings = self.settings
        settings["max_new_tokens"] = self._room(messages, settings["max_new_tokens"])
        stream = es.stream(
            self.model, self.tokenizer, messages, seed=seed, **settings, **self.adapters
        )
        self.asked += 1
        return stream

    def _room(self, messages: list[Message], asked: int) -> int:
        """Return the most new tokens: as many as were asked for and the model's context leaves."""
        if self.model.reach is None:
            return asked
        ids = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        room: int = self.model.reach - len(ids)
        if room <= 0:
            raise OversizeError(
                "the conversation has become longer than the model's context",
                wanted=f"fewer than {self.model.reach} tokens",
                got=len(ids),
                do="/undo takes the last answer back, /clear starts anew, /save FILE keeps all",
            )
        return min(room, asked)
