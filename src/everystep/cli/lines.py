"""The lines that a user of `everystep chat` types or pipes in.

On a terminal there is a prompt with line editing and history, and Ctrl-C gives up the line; from a
pipe or a file each line is a message and nothing is printed for it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from everystep.cli.interrupts import Interrupts
from everystep.cli.prompts import decoded
from everystep.cli.terminal import is_terminal, note, write_line

PROMPT = "> "


def is_dialogue() -> bool:
    """Whether a person types and reads."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def typed_lines(interrupts: Interrupts) -> Iterator[str]:
    """Every line that is typed, until Ctrl-D."""
    with suppress(ImportError):  # not every build of Python has it; then lines cannot be edited
        import readline  # noqa: F401  (importing it is what gives `input` history and editing)
    while True:
        try:
            with interrupts.raised():
                line = input(PROMPT)
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
        yield decoded(line, f"line {number} of standard input").rstrip("\r\n")
