"""What the user says at once: a prompt, the text of a file, Ctrl-C.

A prompt is an argument, a file, or standard input. It is read whole, must be UTF-8, and loses one
final line break, which editors and `echo` add.
"""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from everystep.cli.terminal import is_terminal, note
from everystep.errors import FileError, MissingFileError

_LONGEST = 16_000_000
PATIENCE = 3.0
"""Seconds for which a pipe beside a prompt may stay empty."""


def read_prompt(argument: str | None, file: Path | None) -> str:
    """Return the prompt's text; `-` as argument, or none into a pipe, reads standard input.

    What a pipe or a file hands on beside a prompt follows it after a blank line.
    """
    if argument is not None and file is not None:
        raise typer.BadParameter("PROMPT and --file were both given; give one of them")
    if file is not None:
        text = _with_input(read_text(file))
    elif argument not in (None, "-"):
        # The interpreter hands on bytes that are not UTF-8 as lone surrogates.
        text = decoded(str(argument).encode("utf-8", "surrogateescape"), "the prompt")
        text = _with_input(text)
    elif sys.stdin is None or (argument is None and is_terminal(sys.stdin)):
        raise typer.BadParameter("no prompt was given; give PROMPT, --file, or text through a pipe")
    else:
        text = _input()
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return text


def _with_input(said: str) -> str:
    """Return what was said, followed by standard input, where that has something to say."""
    if sys.stdin is None or sys.stdin.closed or is_terminal(sys.stdin) or not _delivers():
        return said
    more = _input()
    return f"{said}\n\n{more}" if more.strip() else said


def _delivers() -> bool:
    """Return whether standard input is a file, or a pipe that holds something or has ended.

    A program that is started by another one may have inherited a pipe into which nobody ever
    writes, so it is not waited for without end.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (OSError, ValueError):
        return True  # text in memory, for which nobody has to wait
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        return stat.S_ISREG(mode)
    ready, _, _ = select.select([descriptor], [], [], PATIENCE)
    if not ready:
        note(
            f"nothing came through the pipe within {PATIENCE:g} seconds, so it is left out."
            " `everystep generate -` and `everystep chat -` wait; </dev/null says that"
            " none is meant."
        )
    return bool(ready)


def _input() -> str:
    """Return the whole of standard input."""
    return _whole(sys.stdin.buffer.read(_LONGEST + 1), "standard input")


def read_text(file: Path) -> str:
    """Return the text of a file, without its final line break.

    Raise FileError if it is unreadable.
    """
    try:
        with file.open("rb") as opened:
            return _whole(opened.read(_LONGEST + 1), str(file))
    except FileNotFoundError as error:
        raise MissingFileError(f"there is no file {str(file)!r}.") from error
    except IsADirectoryError as error:
        do = "Give a file that holds text"
        raise FileError(f"{str(file)!r} is a folder", do=do) from error


def _whole(data: bytes, where: str) -> str:
    """Return the text of all that a file holds, without its final line break."""
    if len(data) > _LONGEST:
        raise FileError(f"{where} is too long", wanted=f"at most {_LONGEST} bytes")
    return decoded(data, where).removesuffix("\n").removesuffix("\r")


def decoded(data: bytes, where: str) -> str:
    """Return the bytes as text; raise FileError that says where they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{where} is not UTF-8 text",
            got=f"byte 0x{data[error.start]:02x} at offset {error.start}",
            do="Convert it, for instance with iconv",
        ) from error


class Interrupts:
    """A context in which Ctrl-C sets `wished`, and a further one raises.

    An exception could strike the engine in the middle of a step; here the first Ctrl-C is only
    remembered, for code that asks between two steps. The second one raises KeyboardInterrupt after
    all, and while a line is typed the first one does. Installed for a whole chat, it leaves no
    moment in which Ctrl-C would end the program.
    """

    def __init__(self) -> None:
        self.wished = False
        self._raises = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        # Only the main thread may say what a signal does; elsewhere none arrives.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Let Ctrl-C raise at once inside, and forget what was wished before."""
        self.wished = False
        self._raises = True
        try:
            yield
        finally:
            self._raises = False

    def _remember(self, *_: object) -> None:
        if self._raises or self.wished:
            raise KeyboardInterrupt
        self.wished = True
