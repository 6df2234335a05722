"""The tables of the guide about switching that say what is refused."""

from __future__ import annotations

import re
from pathlib import Path

_GUIDE = Path(__file__).parents[2] / "docs/guide/switching.md"


def refused(title: str) -> list[list[str]]:
    """The rows of the table under a title of "Refused, and why", cell by cell."""
    section = _GUIDE.read_text().partition("## Refused, and why\n")[2]
    text = section.partition("\n## ")[0].partition(f"### {title}\n")[2].partition("\n### ")[0]
    rows = [re.split(r" \| ", line.strip("| ")) for line in text.splitlines() if line[:1] == "|"]
    assert rows and all(len(row) == 3 for row in rows), title
    return rows[2:]
