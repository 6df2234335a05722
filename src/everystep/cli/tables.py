"""Rows of text: aligned under headings for a person, separated by tabs for a program."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from everystep.cli.terminal import harmless, is_terminal, write_line


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The rows are on standard output; without a terminal there are no headings."""
    if not is_terminal(sys.stdout):
        for row in rows:
            write_line("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(Text(harmless(cell)) for cell in row))
    Console().print(table)
