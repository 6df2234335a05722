"""`/set` in a chat: how answers are found, changed while it goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from everystep.cli.command_options import judged, keyword_of, kind_of
from everystep.cli.conversation import USUAL_LENGTH, Conversation
from everystep.config import FIELDS, merge_configs
from everystep.errors import RequestError, nearest, shown


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _texts(text: str) -> list[str]:
    """Return the texts of a JSON string or list, else the text as it is typed."""
    try:
        value = json.loads(text)
    except ValueError:
        return [text]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    return [value if isinstance(value, str) else text]


SETTINGS = (
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("max_new_tokens", "repetition_penalty", "stop"),
)
"""The options that can be changed in a chat."""
_READ: Mapping[object, tuple[Callable[[str], Any], str]] = {
    bool: (_switch, "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    list[str]: (_texts, "a text, or a list of texts in JSON"),
}
"""By type: how a value is read, and what that is called."""


def change(conversation: Conversation, name: str, text: str) -> None:
    """Set a value for the next answers; `none` leaves it to the model again.

    Raise RequestError, and change nothing, for an unknown name and for a value that is impossible
    or goes with another one that is set.
    """
    if name not in SETTINGS:
        close = nearest(name, SETTINGS)
        do = f"Perhaps {close} is meant" if close else f"There are {', '.join(SETTINGS)}"
        raise RequestError(f"there is nothing called {name!r} to set", do=do)
    if not text:
        return
    value = None if text == "none" else _read(name, text)
    if name == "seed":
        conversation.seed = value
        return
    if name == "max_new_tokens" and value is None:
        value = USUAL_LENGTH
    said = {**conversation.said, keyword_of(name): value}
    said = {one: known for one, known in said.items() if known is not None}
    judged(said)
    conversation.said = said


def _read(name: str, text: str) -> Any:
    read, kind = _READ[kind_of(name)]
    try:
        return read(text)
    except (ValueError, KeyError) as error:
        raise RequestError(f"{name} cannot be this", wanted=kind, got=shown(text)) from error


def shown_settings(conversation: Conversation, name: str = "") -> list[str]:
    """Return what is set, one line each, or the one of this name; the rest is the model's own."""
    values: dict[str, Any] = {**conversation.settings, "seed": conversation.seed}
    model, fields = conversation.model, {one: values[one] for one in values if one in FIELDS}
    held = merge_configs(fields, None, model.generation_config, model.chat_defaults)
    lines = []
    for one in (name,) if name else SETTINGS:
        value, told = values.get(keyword := keyword_of(one)), ""
        if value is None and keyword in held and held.source(keyword) == "chat":
            value, told = held[keyword], ", as in every chat"
        lines.append(f"{one} {_word(value)}{told}")
    return lines


def _word(value: Any) -> str:
    return "as the model says" if value is None else json.dumps(value, ensure_ascii=False)
