"""The program of a process that compiles grammars to see what that takes; `trials.py` starts it.

It reads a vocabulary from its input, and then answers each grammar with what became of it, until
its input ends. The system ends it where a grammar takes too much processor time, and gives it no
more memory than it may have.
"""

from __future__ import annotations

import os
import sys
from io import RawIOBase
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGES = ("", "config", "files", "processors", "processors.grammars", "text")
_PAGE = 4096


def _import_own(paths: list[str]) -> tuple[ModuleType, ...]:
    """Import what reads grammars, without what its packages import for others, such as torch."""
    sys.path.extend(paths)
    here = Path(__file__).parents[2]
    for name in _PACKAGES:
        package = ModuleType(f"everystep.{name}".rstrip("."))
        package.__path__ = [str(here.joinpath(*name.split(".")))]
        sys.modules[package.__name__] = package
    from everystep import errors
    from everystep.processors.grammars import grammar, source, vocabulary
    from everystep.text import caged

    return errors, grammar, source, vocabulary, caged


def _resident() -> int:
    """Return the bytes of memory that this process has, as far as the system says it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _mapped() -> int:
    """Return the bytes of addresses that this process has; a gigabyte where nobody says."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 1 << 30


def main(questions: RawIOBase, answers: RawIOBase) -> None:
    """Answers until the questions end."""
    if hasattr(os, "nice"):
        os.nice(5)  # who waits for a grammar waits longer than who waits for the next token
    errors, grammar, source, vocabulary, caged = _import_own(sys.argv[1:])
    told = caged.unpacked(caged.receive(questions) or b"")
    own = vocabulary.unpacked_vocabulary(told["vocabulary"])
    more = {"RLIMIT_AS": _mapped() + told["memory"]}
    caged.bound_resources({**more, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0})
    base = _resident()
    caged.send(answers, caged.packed("ready"))

    def tried(kind: Any, value: Any, is_read: bool) -> dict[str, Any]:
        try:
            made = source.GrammarSource if is_read else source.read_source
            found = grammar.compile_grammar(made(kind, value), own)
        except errors.EverystepError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {"text": found.source.text, "bytes": max(_resident() - base, 0)}

    while (question := caged.receive(questions)) is not None:
        caged.end_after(told["seconds"])
        try:
            answer = tried(*caged.unpacked(question))
        except MemoryError:
            os.abort()
        caged.end_after(0)
        caged.send(answers, caged.packed(answer))


if __name__ == "__main__":
    with open(0, "rb", buffering=0) as incoming, open(1, "wb", buffering=0) as outgoing:
        main(incoming, outgoing)
