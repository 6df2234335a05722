"""The command `everystep`.

One file per command; `app` gathers them, `failures` turns what goes wrong into an exit code and a
line on standard error. Answers go to standard output, everything about them to standard error.
torch is imported only by commands that run a model, so `--help` and `--version` do without it.
"""

from __future__ import annotations

from everystep.cli.app import main

__all__ = ["main"]
