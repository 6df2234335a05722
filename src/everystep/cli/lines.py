"""What is said in a chat: messages that are typed, with editing and history, or come from a pipe.

A message is a line. One that ends in a backslash goes on in the next line. What stands between two
lines of three quotation marks is one message as it is, and so is a pasted text of several lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everystep.cli.terminal import note, write_line
from everystep.cli.user_input import Interrupts, decoded
from everystep.errors import FileError
from everystep.files.atomic import atomic_file
from everystep.files.opening import read_bounded

readline: Any = None
with suppress(ImportError):  # not every build of Python has it; then lines cannot be edited
    import readline

FENCE = '"""'
MOST_LINES = 1000
"""The number of lines that a history keeps."""
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Said:
    """A message, or a command if it begins with a slash; not where it was `quoted`."""

    text: str
    quoted: bool = False


def typed(interrupts: Interrupts) -> Iterator[Said]:
    """Yield everything that is typed, where Ctrl-C gives up the message, until Ctrl-D."""
    while True:
        try:
            with interrupts.raised():
                said = _whole(input)
        except KeyboardInterrupt:
            write_line()
            note("Ctrl-D or /exit ends the chat")
        except EOFError:
            write_line()
            return
        else:
            yield said


def piped() -> Iterator[Said]:
    """Yield everything that standard input says."""
    lines = enumerate(sys.stdin.buffer, 1)

    def line(prompt: str) -> str:
        number, data = next(lines, (0, None))
        if data is None:
            raise EOFError
        return decoded(data, f"line {number} of standard input").rstrip("\r\n")

    while True:
        try:
            said = _whole(line)
        except EOFError:
            return
        yield said


def _whole(line: Callable[[str], str]) -> Said:
    """Return one message, which the end of the input ends too.

    Raise EOFError if nothing is left.
    """
    text = line("> ")
    if "\n" in text:  # pasted
        return Said(text, quoted=True)
    quoted = text.strip() == FENCE
    parts: list[str] = []
    with suppress(EOFError):
        if quoted:
            while (text := line("... ")).strip() != FENCE:
                parts.append(text)
            return Said("\n".join(parts), quoted)
        while text.endswith("\\"):
            parts.append(text.removesuffix("\\"))
            text = ""
            text = line("... ")
    return Said("\n".join(parts if quoted else [*parts, text]), quoted)


@contextmanager
def history(file: Path) -> Iterator[None]:
    """Let lines of earlier chats be called back inside, and keep those typed inside in the file.

    Nobody else can read the file. A line that begins with a space is not kept. Where the file
    cannot be read or written, a note says so, and the chat goes on.
    """
    if readline is None:
        yield
        return
    # Python turns it off; a pasted text of several lines is one message with it.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.clear_history()
    before = _kept(file)
    for line in before:
        readline.add_history(line)
    try:
        yield
    finally:
        count = readline.get_current_history_length()
        lines = [readline.get_history_item(number + 1) for number in range(len(before), count)]
        if new := [line for line in lines if line and not line.startswith(" ")]:
            _keep(file, new)


def _kept(file: Path) -> list[str]:
    """Return the lines that a history has."""
    if not file.exists():
        return []
    try:
        text = read_bounded(file, _MOST_BYTES).decode("utf-8", "replace")
    except (FileError, OSError) as error:
        note(f"the history of earlier chats cannot be read: {error}")
        return []
    return [line for line in text.split("\n") if line and line.isprintable()][-MOST_LINES:]


def _keep(file: Path, new: list[str]) -> None:
    """Keep the last lines of what the file has by now, also of other chats, and of the new ones."""
    lines = [line.replace("\n", " ") for line in [*_kept(file), *new]][-MOST_LINES:]
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    # From the end, and from the beginning of a line, so that it can be read again.
    data = data if len(data) <= _MOST_BYTES else data[-_MOST_BYTES:].partition(b"\n")[2]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as opened:
            os.fchmod(opened.fileno(), 0o600)
            opened.write(data)
    except (FileError, OSError) as error:
        note(f"the history of this chat cannot be kept: {error}")
