"""The table of docs/guide/clients.md, made of what the programs of clients show.

    python -m tests.clients.page --write

`scripts/clients` writes it once all programs have shown what they say.
"""

from __future__ import annotations

import sys

from tests.clients.client import CLIENTS
from tests.reading import ROOT

PAGE = ROOT / "docs" / "guide" / "clients.md"
BEGIN, END = "<!-- clients: begin -->", "<!-- clients: end -->"


def table() -> str:
    """Return the rows: a client, its release, and what it was seen to do."""
    rows = [f"| {one.name} | {one.release} | {'; '.join(one.shown())} |\n" for one in CLIENTS]
    return "| client | release | seen |\n| --- | --- | --- |\n" + "".join(rows)


def written() -> str:
    """Return the table as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN + "\n")[2].partition(END)[0]


def main(arguments: list[str]) -> int:
    """Show the table, or write it into the page."""
    if arguments != ["--write"]:
        print(table(), end="")
        return 0
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN + "\n")
    PAGE.write_text(
        before + BEGIN + "\n" + table() + END + rest.partition(END)[2], encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
