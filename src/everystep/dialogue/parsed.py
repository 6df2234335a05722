"""What a parser says of a model's text, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer itself. `raw` is here as in every event: what the model wrote for it,
    so that those of all events, joined, are the whole text."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call; `index` is its number in the answer."""

    index: int
    id: str
    name: str
    raw: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which joined are a text of JSON."""

    index: int
    text: str
    raw: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call; `complete`: its arguments are one JSON object in strict JSON. They are not
    where the answer was cut, or the model wrote something else."""

    index: int
    complete: bool
    raw: str


@dataclass(frozen=True, slots=True)
class Markup:
    """A piece between all these, which says nothing: a tag, or blanks beside one."""

    raw: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the answer, after so many calls."""

    calls: int
    raw: str = ""


DialogueEvent = Content | Thought | CallBegin | CallArguments | CallEnd | Markup | Finish


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool: its id, its name, and its arguments as a text of JSON.

    `complete`: that text is a JSON object. It is not where the answer was cut.
    """

    id: str
    name: str
    arguments: str
    complete: bool = True
