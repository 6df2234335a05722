"""How an answer is put on standard output: as text, as one JSON document, or as JSON lines.

A writer sees every event when it happens and the results at the end. Text is streamed where one
answer is asked for; several answers would be mixed up, so they come one after another at the end.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from everystep.cli.terminal import is_terminal, write, write_line

SEPARATOR = "---"


class Form(StrEnum):
    """The form of the output."""

    text = "text"
    json = "json"
    jsonl = "jsonl"


@dataclass
class Timings:
    """Seconds, measured from the start of the command's own work."""

    load_seconds: float = 0.0
    first_token_seconds: float | None = None
    generate_seconds: float = 0.0
    _mark: float = field(default_factory=time.perf_counter)

    def loaded(self) -> None:
        """Notes that the model is loaded; from now on generating is measured."""
        now = time.perf_counter()
        self.load_seconds, self._mark = now - self._mark, now

    def event(self) -> None:
        """A token has arrived."""
        self.generate_seconds = time.perf_counter() - self._mark
        if self.first_token_seconds is None:
            self.first_token_seconds = self.generate_seconds

    def document(self) -> dict[str, float | None]:
        """The measured times by name."""
        times = {name: value for name, value in asdict(self).items() if name != "_mark"}
        return {name: None if v is None else round(v, 6) for name, v in times.items()}


class Writer(Protocol):
    """Receives what happens while an answer is found."""

    def event(self, event: Any) -> None:
        """A token, or the end of a sequence, has arrived."""

    def end(self, results: Sequence[Any], about: dict[str, Any]) -> None:
        """All sequences have ended; `about` holds what is known beside them."""


class TextWriter:
    """Plain text: streamed if one answer is asked for, else separated by lines of dashes."""

    def __init__(self, answers: int) -> None:
        self._streams = answers == 1
        self._last = ""

    def event(self, event: Any) -> None:
        """The text of a token is shown."""
        if self._streams and event.text:
            write(event.text)
            self._last = event.text

    def end(self, results: Sequence[Any], about: dict[str, Any]) -> None:
        """What was not streamed is shown, and the last line is ended."""
        if self._streams:
            if not self._last.endswith("\n"):
                write_line()
            return
        write_line(f"\n{SEPARATOR}\n".join(result.text.rstrip("\n") for result in results))


class JsonWriter:
    """One document when everything has ended; `scored`: the scores mean something (beams)."""

    def __init__(self, scored: bool) -> None:
        self._scored = scored

    def event(self, event: Any) -> None:
        """Nothing is shown before the end."""

    def end(self, results: Sequence[Any], about: dict[str, Any]) -> None:
        """The document is written."""
        documents = [result_document(result, self._scored) for result in results]
        write_document({"results": documents, **about})


class EventWriter:
    """One JSON document per token, on a line of its own, as it comes."""

    def event(self, event: Any) -> None:
        """The event is written."""
        write_line(_encoded(event_document(event), None))

    def end(self, results: Sequence[Any], about: dict[str, Any]) -> None:
        """The last event of each sequence has already said why it ended."""


def writer_for(form: Form, answers: int, scored: bool) -> Writer:
    """The writer of a form of output."""
    if form is Form.json:
        return JsonWriter(scored)
    return EventWriter() if form is Form.jsonl else TextWriter(answers)


def write_document(value: Any) -> None:
    """A JSON document is on standard output, indented if a person reads it."""
    write_line(_encoded(value, 2 if is_terminal(sys.stdout) else None))


def result_document(result: Any, scored: bool) -> dict[str, Any]:
    """One continuation as JSON types."""
    score = {"score": result.score if math.isfinite(result.score) else None}
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        **_finish(result.finish_reason),
        **(score if scored else {}),
    }


def event_document(event: Any) -> dict[str, Any]:
    """One event as JSON types; `token` is null where an event only ends a sequence."""
    finish = {} if event.finish is None else _finish(event.finish)
    return {
        "sequence": event.index,
        "position": event.position,
        "token": event.token if event.token >= 0 else None,
        "text": event.text,
        "logprob": event.logprob,
        **finish,
    }


def _finish(reason: Any) -> dict[str, Any]:
    matched = reason.matched
    plain = matched if isinstance(matched, str | int | None) else str(matched)
    return {"finish_reason": reason.kind, "matched": plain}


def _encoded(value: Any, indent: int | None) -> str:
    # Where the stream cannot express a character, an escape loses nothing.
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return json.dumps(value, indent=indent, ensure_ascii=encoding != "utf8", allow_nan=False)
