"""The answers to a conversation where neither caller nor model says how."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everystep.config.fields import FIELDS, META, unknown_name
from everystep.config.named_strategies import SEARCHES
from everystep.errors import RequestError, shown
from everystep.files.sources import DEFAULT_MODEL

MOST_NEW_TOKENS = 512

_CHOOSES = (
    *("do_sample", *SEARCHES),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "top_n_sigma"),
    *("epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat_tau", "dynatemp_range"),
    *("sampler_order", "guidance_scale"),
)
"""Fields that say how tokens are chosen: with one of them, nothing else is assumed."""

_INSTRUCTS = ("system", "developer")
"""Roles of a message in whose presence a default system message has no place."""


@dataclass(frozen=True)
class ChatDefaults:
    """The defaults of a chat, which hold for messages in every call.

    `system`: what a conversation without a system message begins with, None for what the chat
    template says. `sampling`: options of a chat in which nothing says how tokens are chosen.

    Example:

        >>> model.chat_defaults = es.ChatDefaults("Answer in one word.", {"do_sample": False})
    """

    system: str | None = None
    sampling: Mapping[str, object] = field(
        default_factory=lambda: {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    )

    def __post_init__(self) -> None:
        text: object = self.system
        if not isinstance(text, str | None):
            what = "the system message of a chat is a text"
            raise RequestError(what, wanted="a text or None", got=shown(text))
        for name, value in self.sampling.items():
            if name not in FIELDS or name in META:
                raise unknown_name(name, "the sampling of a chat has no")
            FIELDS[name].read(value)

    def begun(self, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the messages, after a default system message where nothing instructs the model."""
        roles = [turn.get("role") for turn in messages if isinstance(turn, Mapping)]
        if self.system is None or any(role in roles for role in _INSTRUCTS):
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def fields(self, said: Collection[str], *, chosen: bool, limited: bool) -> dict[str, Any]:
        """Return the values of the fields that a chat assumes.

        `said`: fields that have a value from the caller or the model. `chosen`: something beside
        the fields says how tokens are chosen. `limited`: something says how long an answer is.
        """
        sampling = {} if chosen or any(name in said for name in _CHOOSES) else self.sampling
        length = {} if limited or "max_new_tokens" in said else {"max_new_tokens": MOST_NEW_TOKENS}
        return {name: FIELDS[name].read(value) for name, value in {**length, **sampling}.items()}


KNOWN: Mapping[str, ChatDefaults] = {
    # So small a model answers best greedily, and after a plainer system message than its own.
    DEFAULT_MODEL: ChatDefaults("You are a helpful assistant.", {}),
}
"""Named models -> their defaults, where those of others would answer worse."""


def chat_defaults_of(source: object) -> ChatDefaults:
    """Return the defaults of a model that was loaded from `source`."""
    return KNOWN.get(source.lower(), ChatDefaults()) if isinstance(source, str) else ChatDefaults()
