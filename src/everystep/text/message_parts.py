"""The parts of messages, and those that chat templates would leave out without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from everystep.errors import UnsupportedError

_UNREAD = {
    **dict.fromkeys(
        ("audio", "audio_url", "input_audio"),
        ("sounds", "Let a Whisper write the sound down (model.generate), and pass the text"),
    ),
    "video_url": ("videos at addresses", "Pass {'type': 'video', 'video': [its frames]}"),
    "file": ("files", "Pass the text that is in it"),
}
"""Types of parts that others' interfaces have -> what they would be, and what to pass instead."""


def parts_of(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of all messages whose content has parts."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list | tuple):
            yield from (part for part in content if isinstance(part, Mapping))


def refuse_unread_parts(messages: Iterable[Any]) -> None:
    """Raise UnsupportedError for a part of a message that no template prints."""
    for part in parts_of(messages):
        kind = part.get("type")
        if isinstance(kind, str) and kind in _UNREAD:
            what, do = _UNREAD[kind]
            got = f"a part of the type {kind}"
            raise UnsupportedError(f"messages hold no {what}", got=got, do=do)
