"""What goes wrong, as an exit code and a line or two on standard error.

A user's mistake never shows a traceback. EVERYSTEP_DEBUG=1 shows it for every failure, which is
also how a defect of the library is to be reported.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer

from everystep.cli.adapters import WITHOUT_ADAPTERS
from everystep.cli.command_options import option_for
from everystep.cli.terminal import harmless, is_terminal, note
from everystep.config.foreign_names import COMMANDS, OPTIONS, SAME
from everystep.errors import (
    CapacityError,
    EverystepError,
    InvariantError,
    RequestError,
    UnsupportedError,
)
from everystep.files.sources import SourceSettings
from everystep.requests.door import KEYWORDS

# Releases of typer differ in which module defines click's exceptions, so the base of all that a
# wrong command line can raise is found from the one that each of them exports.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]
_ClickException: type[Any] = typer.BadParameter.__mro__[2]

_FAILURE = 1
_USAGE = 2
_INTERRUPTED = 130
_BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports for any program whose reader went away


def exit_code_of(action: Callable[[], None]) -> int:
    """Run `action` to its end and return an exit code; what went wrong is on standard error."""
    try:
        with _plain_warnings():
            action()
    except typer.Exit as request:
        return request.exit_code
    except BrokenPipeError:
        _silence_output()
        return _BROKEN_PIPE
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # what rich makes of it
            return _BROKEN_PIPE
        raise
    except (KeyboardInterrupt, typer.Abort):
        if is_terminal(sys.stdout):
            sys.stderr.write("\n")  # the answer stands in the middle of its line
        note("interrupted")
        return _INTERRUPTED
    except Exception as error:
        if _debugging():
            sys.stderr.write(harmless("".join(traceback.format_exception(error))))
        code, text, hint = _reading(error)
        note(text)
        if hint:
            note(hint)
        return code
    return 0


def _reading(error: Exception) -> tuple[int, str, str]:
    """Return exit code, what is wrong, and where to go from there (or nothing)."""
    if isinstance(error, _ClickException):
        context = error.ctx if isinstance(error, _UsageError) else None
        hint = f"`{context.command_path} --help` shows what there is." if context else ""
        text = _sentence(error.format_message())
        if context and getattr(error, "option_name", "") == "--adapter":
            path = context.command_path
            if told := WITHOUT_ADAPTERS.get(([*path.split(), ""])[1]):
                return error.exit_code, f"`{path}` takes no adapter.", told
        return error.exit_code, text, _foreign(error, text, hint) or hint
    if isinstance(error, RequestError) and not isinstance(error, UnsupportedError | CapacityError):
        return _USAGE, str(error), ""
    if isinstance(error, EverystepError) and not isinstance(error, InvariantError):
        return _FAILURE, str(error), ""
    if isinstance(error, OSError):
        return _FAILURE, _sentence(str(error)), ""
    if isinstance(error, MemoryError):
        return _FAILURE, "There is not enough memory.", ""
    text = _sentence(f"{type(error).__name__}: {error}".removesuffix(": "))
    return _FAILURE, f"Unexpected failure: {text}", "EVERYSTEP_DEBUG=1 shows where it happened."


def _foreign(error: Any, text: str, hint: str) -> str | None:
    """Return what is to be typed for an option or a command of another program, or for a keyword
    that the command has no option for; `hint`: where the options are listed."""
    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    if name in OPTIONS:
        return OPTIONS[name]
    keyword = SAME.get(name, name)
    if keyword in KEYWORDS:
        known = {one for param in error.ctx.command.params for one in param.opts}
        ours = option_for(keyword)
        typed = "" if ours is None else f"--{ours.replace('_', '-')}"
        if typed in known:
            return f"{typed} is the option here."
        if typed:
            return f"`everystep generate` has the option {typed}."
        if KEYWORDS[keyword].elsewhere is None:
            return f"{hint} In Python, es.generate(..., {keyword}=) takes it."
    command = re.match(r"No such command '([\w-]+)'", text)
    return COMMANDS.get(command.group(1)) if command else None


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _debugging() -> bool:
    value = SourceSettings.from_environment().variables.get("EVERYSTEP_DEBUG", "")
    return value.strip().lower() not in {"", "0", "false", "no", "off"}


def _silence_output() -> None:
    # The interpreter flushes standard output once more when it ends, and would complain.
    with suppress(OSError, ValueError):  # not backed by a file, so nothing to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings as one line on standard error, without the line of code that gave them."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        note(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
