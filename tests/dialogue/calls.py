"""Tools, and answers that are parsed in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everystep.dialogue import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Dialect,
    DialogueEvent,
    Parser,
    Thought,
    read_tools,
)

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1},
                    "warm": {"type": "boolean"},
                    "hours": {"type": "array", "items": {"type": "integer"}},
                    "unit": {"enum": ["C", "very F"]},
                },
                "required": ["city", "days"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": ["string", "null"]}},
            },
        },
    },
]
READ = read_tools(TOOLS)
ARGUMENTS: dict[str, Any] = {
    "city": 'São "Paulo"\n{x} \\ <b>',
    "days": 3,
    "warm": True,
    "hours": [6, 12],
    "unit": "very F",
}
CALLS: list[tuple[str, dict[str, Any]]] = [("get_weather", ARGUMENTS), ("now", {"zone": "UTC"})]


def parsed(
    dialect: Dialect, text: str, cuts: Sequence[int] = (), **how: Any
) -> list[DialogueEvent]:
    """The events of a text that comes in these pieces, one for each run of a kind."""
    parser, events, last = Parser(dialect, READ, **how), list[DialogueEvent](), 0
    for cut in (*cuts, len(text)):
        events += parser.feed(text[last:cut])
        last = cut
    return merged([*events, *parser.close()])


def merged(events: Sequence[DialogueEvent]) -> list[DialogueEvent]:
    """Events with neighbours of one kind made one, as pieces divide them by chance alone."""
    found: list[Any] = []
    for one in events:
        last = found[-1] if found else None
        if type(last) is not type(one) or isinstance(one, CallBegin | CallEnd):
            found.append(one)
            continue
        joined = {"raw": last.raw + one.raw}
        if hasattr(one, "text"):
            joined["text"] = last.text + one.text
        if isinstance(one, CallArguments):
            joined["index"] = one.index  # type: ignore[assignment]
        found[-1] = type(one)(**joined)
    return found


def parts(events: Sequence[DialogueEvent]) -> tuple[str, str, list[tuple[str, Any, bool]]]:
    """Content, thoughts, and each call with its arguments read and whether it is complete."""
    content = "".join(one.text for one in events if isinstance(one, Content))
    thought = "".join(one.text for one in events if isinstance(one, Thought))
    calls = []
    for begin in (one for one in events if isinstance(one, CallBegin)):
        own = [one for one in events if getattr(one, "index", None) == begin.index]
        text = "".join(one.text for one in own if isinstance(one, CallArguments))
        complete = any(isinstance(one, CallEnd) and one.complete for one in own)
        try:
            calls.append((begin.name, json.loads(text), complete))
        except ValueError:
            calls.append((begin.name, text, complete))
    return content, thought, calls
