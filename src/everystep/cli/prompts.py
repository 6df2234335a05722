"""Where the prompt of `everystep generate` comes from: an argument, a file, or standard input.

Whatever it is, it is read whole, must be UTF-8, and loses one final line break, which editors and
`echo` add. What is done with the text is for the caller to say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from everystep.cli.terminal import is_terminal
from everystep.errors import FileError, MissingFileError, message

STANDARD_INPUT = "-"
_LONGEST = 16_000_000


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The text of the prompt; `-` as argument, or no argument into a pipe, reads standard input."""
    if argument is not None and file is not None:
        raise typer.BadParameter("PROMPT and --file were both given; give one of them")
    if file is not None:
        text = _without_final_break(_read_file(file))
    elif argument not in (None, STANDARD_INPUT):
        text = _checked_argument(str(argument))
    else:
        text = _without_final_break(_read_input(explicitly=argument is not None))
    if not text.strip():
        raise typer.BadParameter("the prompt is empty")
    return text


def decoded(data: bytes, where: str) -> str:
    """The bytes as text; FileError says where they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(
            message(
                f"{where} is not UTF-8 text",
                got=f"byte 0x{data[error.start]:02x} at offset {error.start}",
                do="Convert it, for instance with iconv",
            )
        ) from error


def _read_file(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LONGEST + 1)
    except FileNotFoundError as error:
        raise MissingFileError(message(f"there is no file {str(file)!r}")) from error
    except IsADirectoryError as error:
        raise FileError(
            message(f"{str(file)!r} is a folder", do="Give a file that holds the prompt")
        ) from error
    return decoded(_bounded(data, str(file)), str(file))


def _read_input(explicitly: bool) -> str:
    if is_terminal(sys.stdin) and not explicitly:
        raise typer.BadParameter("no prompt was given; give PROMPT, --file, or text through a pipe")
    data = sys.stdin.buffer.read(_LONGEST + 1)
    return decoded(_bounded(data, "standard input"), "standard input")


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > _LONGEST:
        raise FileError(message(f"{where} is too long", wanted=f"at most {_LONGEST} bytes"))
    return data


def _checked_argument(text: str) -> str:
    # The interpreter hands on bytes that are not UTF-8 as lone surrogates.
    return decoded(text.encode("utf-8", "surrogateescape"), "the prompt")


def _without_final_break(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
