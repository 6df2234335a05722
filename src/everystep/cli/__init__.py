"""The command `everystep`.

One file per command; `app` gathers them, `failures` turns what goes wrong into an exit code and a
line on standard error. Answers go to standard output, everything about them to standard error.
torch is imported only by commands that run a model, so `--help` and `--version` do without it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from everystep.errors import MissingExtraError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, the program's own without `arguments`, and return its exit code.

    Codes: see `everystep.cli.app.main`. Without the extra `cli` it is 1, with a line that says so.
    """
    try:
        from everystep.cli.app import main as run
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in ("typer", "rich"):
            raise
        missing = MissingExtraError.of("the command line", library, "cli")
        sys.stderr.write(f"everystep: {missing}\n")
        return 1
    return run(arguments)
