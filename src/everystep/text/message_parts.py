"""Parts of messages that chat templates would leave out without a word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def refuse_unread_parts(messages: Sequence[Any]) -> None:
    """Raise UnsupportedError for a part of a message that no template prints."""
    contents = (turn.get("content") for turn in messages if isinstance(turn, Mapping))
    for part in (part for parts in contents if isinstance(parts, list | tuple) for part in parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind in _UNREAD:
            what, do = _UNREAD[kind]
            got = f"a part of the type {kind}"
            raise UnsupportedError(f"messages hold no {what}", got=got, do=do)
