"""Writing to the two output streams: answers to one, everything about them to the other.

What goes to a terminal is cleared of control characters, because a model may have learnt to write
them and a terminal obeys them; what goes into a pipe or a file is written unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TextIO

from everystep.cli.wrapping import Wrapped
from everystep.errors import FileError

# C0 without tab and line feed, DEL, and C1: with these a text could move the cursor or worse. Those
# that turn the direction of writing could make it look like another.
_TURNS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160), *_TURNS])


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a person is at the other end of this stream.

    None is one that was closed before the program began.
    """
    return stream is not None and not stream.closed and stream.isatty()


def _columns() -> int:
    """Return how many characters a line of the terminal has."""
    return max(shutil.get_terminal_size().columns, 1)


def harmless(text: str) -> str:
    """Return the text without the characters that a terminal obeys instead of showing them."""
    return text.translate(_CONTROLS)


def write(text: str) -> None:
    """Write the text on standard output at once, with no line break added."""
    sys.stdout.write(harmless(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def write_line(text: str = "") -> None:
    """Write the text on standard output, on a line of its own."""
    write(f"{text}\n")


class AnswerText:
    """An answer on standard output, piece by piece: between words for a person, as it is for a
    program. When the context is left, all of it is there."""

    def __init__(self) -> None:
        self._wrapped = Wrapped(_columns()) if is_terminal(sys.stdout) else None

    def __enter__(self) -> AnswerText:
        return self

    def write(self, piece: str) -> None:
        """Write one more piece, the last word of which may wait for its end."""
        write(piece if self._wrapped is None else self._wrapped(harmless(piece)))

    def __exit__(self, *_: object) -> None:
        if self._wrapped is not None:
            write(self._wrapped.rest())


def write_document(value: Any, *, indent: int | None = None) -> None:
    """Write a JSON document on standard output, in lines of this indent or in one line."""
    # Where the stream cannot express a character, an escape loses nothing.
    narrow = (sys.stdout.encoding or "ascii").lower().replace("-", "") != "utf8"
    write_line(json.dumps(value, indent=indent, ensure_ascii=narrow, allow_nan=False))


def write_report(value: Any) -> None:
    """Write a JSON document on standard output, indented if a person reads it."""
    write_document(value, indent=2 if is_terminal(sys.stdout) else None)


def write_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write the rows, aligned under headings for a person, separated by tabs for a program."""
    if not is_terminal(sys.stdout):
        for row in rows:
            write_line("\t".join(row))
        return
    # Imported where it draws: an answer needs none of it, and waits for every import.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    Console().print(table)


def write_item(heading: str, text: str) -> None:
    """Write lines on standard output, broken between words, that stand beside a heading."""
    from rich.cells import cell_len

    indent = " " * cell_len(heading)
    lines = textwrap.wrap(
        harmless(text),
        max(_columns(), len(indent) + 20),
        initial_indent=heading,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    write_line("\n".join(lines))


def note(text: str) -> None:
    """Write one line on standard error, whatever line breaks the text has.

    On a terminal it is broken between words. Where it cannot be written, as on a full disk, the
    work goes on without it.
    """
    line = f"everystep: {harmless(' '.join(text.split()))}"
    if is_terminal(sys.stderr):
        line = "\n".join(
            textwrap.wrap(line, _columns(), break_long_words=False, break_on_hyphens=False)
        )
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        # The stream keeps the line, and would try again at each line and at the end.
        sys.stderr = _nowhere()


def require_streams() -> None:
    """Make output possible.

    Raise FileError if standard output was closed before the program began.
    """
    if sys.stderr is None:
        sys.stderr = _nowhere()
    if sys.stdout is None:
        do = "Leave >&- out, or write >/dev/null"
        raise FileError("standard output is closed, so there is no place for an answer", do=do)


def _nowhere() -> TextIO:
    """Return a stream that takes everything, open to the end."""
    return open(os.devnull, "w")


def tolerate_narrow_encodings() -> None:
    """Let a stream that cannot express a character show a question mark instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if callable(reconfigure := getattr(stream, "reconfigure", None)):
            reconfigure(errors="replace")
