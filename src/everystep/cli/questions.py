"""What a model is asked: a text to continue, a message to answer, or a question about a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import everystep as es
from everystep.errors import RequestError

Message = dict[str, str]


@dataclass(frozen=True)
class CommandPrompt:
    """`message`: the text goes through the chat template, as it does with a `system` message or
    `images`; `page`: arguments of `es.layout_prompt` for a question about a page, none without one.
    """

    text: str
    message: bool
    system: str | None
    page: Mapping[str, Any]
    images: tuple[Path, ...] = ()

    @property
    def continues(self) -> bool:
        """True if the model sees the text itself and nothing else."""
        asks = self.message or self.system is not None or bool(self.images)
        return not self.page and not asks

    def for_model(self, model: Any, tokenizer: Any) -> Any:
        """Return what `es.stream` takes.

        Raise RequestError for messages to a model without template.
        """
        if self.page:
            return es.layout_prompt(model, tokenizer, self.text, **self.page)
        if self.continues:
            return self.text
        which = "--image" if self.images else "--chat" if self.system is None else "--system"
        require_template(tokenizer, which)
        shown = [{"type": "image", "image": path} for path in self.images]
        content = [*shown, {"type": "text", "text": self.text}] if shown else self.text
        return [*system_message(self.system), {"role": "user", "content": content}]


def system_message(system: str | None) -> list[Message]:
    """Return what stands before all other messages."""
    return [] if system is None else [{"role": "system", "content": system}]


def require_template(tokenizer: Any, what: str) -> None:
    """Raise RequestError where a model cannot be sent messages, as `what` would."""
    if tokenizer.chat_template is None:
        raise RequestError(
            f"{what} needs a model with a chat template",
            got="a model without one",
            do="Take an instruct model, or have `everystep generate` continue a text",
        )
