"""The answers of `es.chat` and `everystep chat` where neither caller nor model says how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from everystep.config import GenerationConfig
from everystep.config.named_strategies import SEARCHES
from everystep.files.sources import DEFAULT_MODEL

MOST_NEW_TOKENS = 512

_CHOOSES = (
    *("do_sample", *SEARCHES, "strategy", "amateur_model", "guidance_scale"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "top_n_sigma"),
    *("epsilon_cutoff", "eta_cutoff", "xtc_probability", "mirostat_tau", "dynatemp_range"),
    "sampler_order",
)
"""Options that say how tokens are chosen: with one of them, nothing else is assumed."""


@dataclass(frozen=True)
class ChatDefaults:
    """The defaults of a chat.

    `system`: what a conversation without a system message begins with, None for what the chat
    template says. `sampling`: options of a chat in which nothing says how tokens are chosen.
    """

    system: str | None = None
    sampling: Mapping[str, object] = field(
        default_factory=lambda: {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
    )

    def begun(self, messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
        """Return the messages, after a default system message where there is none among them."""
        roles = [turn.get("role") for turn in messages]
        if self.system is None or "system" in roles:
            return list(messages)
        return [{"role": "system", "content": self.system}, *messages]

    def completed(self, options: Mapping[str, object], own: GenerationConfig) -> dict[str, Any]:
        """Return the options of a chat, with what they and the model's `own` configuration leave
        open."""
        passed = options.get("generation_config")

        def is_said(name: str) -> bool:
            values = (options.get(name), getattr(passed, name, None), getattr(own, name, None))
            return any(value is not None for value in values)

        def is_asked(name: str) -> bool:
            return name in options or getattr(passed, name, None) is not None

        length = {"max_new_tokens": MOST_NEW_TOKENS}
        limited = is_asked("max_new_tokens") or is_asked("max_length")
        sampling = {} if any(map(is_said, _CHOOSES)) else self.sampling
        return {**({} if limited else length), **sampling, **options}


KNOWN: Mapping[str, ChatDefaults] = {
    # So small a model answers best greedily, and after a plainer system message than its own.
    DEFAULT_MODEL: ChatDefaults("You are a helpful assistant.", {}),
}
"""Named models -> their defaults, where those of others would answer worse."""


def chat_defaults_of(source: object) -> ChatDefaults:
    """Return the defaults of a model that was loaded from `source`."""
    return KNOWN.get(source.lower(), ChatDefaults()) if isinstance(source, str) else ChatDefaults()
