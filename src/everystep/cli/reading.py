"""What the user says: the prompt of `everystep generate`, the lines of `everystep chat`, Ctrl-C.

A prompt is an argument, a file, or standard input. It is read whole, must be UTF-8, and loses one
final line break, which editors and `echo` add.
"""

from __future__ import annotations

import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer

from everystep.cli.terminal import is_terminal, note, write_line
from everystep.errors import FileError, MissingFileError

_LONGEST = 16_000_000


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The text of the prompt; `-` as argument, or no argument into a pipe, reads standard input."""
    if argument is not None and file is not None:
        raise typer.BadParameter("PROMPT and --file were both given; give one of them")
    if (file is not None or argument not in (None, "-")) and _has_input():
        given = "--file" if file is not None else "PROMPT"
        raise typer.BadParameter(
            f"{given} and text through a pipe were both given; give one of them, or add </dev/null"
        )
    if file is not None:
        text = read_text(file)
    elif argument not in (None, "-"):
        # The interpreter hands on bytes that are not UTF-8 as lone surrogates.
        text = _decoded(str(argument).encode("utf-8", "surrogateescape"), "the prompt")
    elif argument is None and is_terminal(sys.stdin):
        raise typer.BadParameter("no prompt was given; give PROMPT, --file, or text through a pipe")
    else:
        text = _whole(sys.stdin.buffer.read(_LONGEST + 1), "standard input")
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return text


def _has_input() -> bool:
    """Whether text stands on standard input, as far as can be known without waiting for it."""
    if sys.stdin is None or sys.stdin.closed or is_terminal(sys.stdin):
        return False
    with suppress(OSError, ValueError, AttributeError):  # no file, or one that was closed
        ready, _, _ = select.select([sys.stdin], [], [], 0)
        return bool(ready) and bool(sys.stdin.buffer.peek(1))  # type: ignore[union-attr]
    return False


def read_text(file: Path) -> str:
    """The text of a file, without its final line break; FileError where it cannot be read."""
    try:
        with file.open("rb") as opened:
            return _whole(opened.read(_LONGEST + 1), str(file))
    except FileNotFoundError as error:
        raise MissingFileError(f"there is no file {str(file)!r}.") from error
    except IsADirectoryError as error:
        do = "Give a file that holds text"
        raise FileError(f"{str(file)!r} is a folder", do=do) from error


def _whole(data: bytes, where: str) -> str:
    """The text of all that a file holds, without its final line break."""
    if len(data) > _LONGEST:
        raise FileError(f"{where} is too long", wanted=f"at most {_LONGEST} bytes")
    return _decoded(data, where).removesuffix("\n").removesuffix("\r")


def _decoded(data: bytes, where: str) -> str:
    """The bytes as text; FileError says where they are not UTF-8."""
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
        """Ctrl-C raises at once inside, and what was wished before is forgotten."""
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


def typed_lines(interrupts: Interrupts) -> Iterator[str]:
    """Every line typed at the prompt, where Ctrl-C gives up the line, until Ctrl-D."""
    with suppress(ImportError):  # not every build of Python has it; then lines cannot be edited
        import readline  # noqa: F401  (importing it is what gives `input` history and editing)
    while True:
        try:
            with interrupts.raised():
                line = input("> ")
        except KeyboardInterrupt:
            write_line()
            note("Ctrl-D or /exit ends the chat")
        except EOFError:
            write_line()
            return
        else:
            yield line


def piped_lines() -> Iterator[str]:
    """Every line of standard input, without its end."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield _decoded(line, f"line {number} of standard input").rstrip("\r\n")
