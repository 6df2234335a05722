"""Writing to the two output streams: answers to one, everything about them to the other.

What goes to a terminal is cleared of control characters, because a model may have learnt to write
them and a terminal obeys them; what goes into a pipe or a file is written unchanged.
"""

from __future__ import annotations

import sys
from typing import TextIO

# C0 without tab and line feed, DEL, and C1: with these a text could move the cursor or worse.
_CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])


def is_terminal(stream: TextIO) -> bool:
    """Whether a person reads this stream."""
    return not stream.closed and stream.isatty()


def harmless(text: str) -> str:
    """The text without the characters that a terminal obeys instead of showing them."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """The text is on standard output at once, with no line break added."""
    sys.stdout.write(harmless(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def write_line(text: str = "") -> None:
    """The text is on standard output, on a line of its own."""
    write(f"{text}\n")


def note(text: str) -> None:
    """One line on standard error, whatever line breaks the text has."""
    line = " ".join(text.split())
    sys.stderr.write(f"everystep: {harmless(line)}\n")
    sys.stderr.flush()


def tolerate_narrow_encodings() -> None:
    """A stream that cannot express a character shows a question mark instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="replace")
