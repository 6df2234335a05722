"""What a program of a client's was seen to do: functions that say it, run one after another.

A program calls `run()` at its end. It runs under the client's Python, which knows nothing of this
project, with the address of a server as its argument.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

_FOUND: list[tuple[str, Callable[[str], None]]] = []


def seen(what: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    """Return what notes that a function, which takes the server's address, shows this."""

    def note(function: Callable[[str], None]) -> Callable[[str], None]:
        _FOUND.append((what, function))
        return function

    return note


def run() -> None:
    """Run what was noted; exit with 1 if anything was not seen."""
    failed = 0
    for what, function in _FOUND:
        try:
            function(sys.argv[1])
        except Exception:
            failed += 1
            print(f"NOT SEEN: {what}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"seen: {what}", flush=True)
    sys.exit(failed > 0)
