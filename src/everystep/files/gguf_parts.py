"""The names of a model that is split into several GGUF files, as llama.cpp's tool writes them."""

from __future__ import annotations

import re

_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def part_names(name: str) -> list[str] | None:
    """`model-00002-of-00003.gguf` -> the names of all three, in order; None for another name."""
    match = _NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    ending = name[match.end("count") :]
    stem, count = match["stem"], match["count"]
    return [f"{stem}-{i:05}-of-{count}{ending}" for i in range(1, int(count) + 1)]
