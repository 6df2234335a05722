"""Stretches of a batch file, which tasks of Ray Data read.

Ray starts a process for each task that reads beside others, and imports this module there: torch
among its imports would cost seconds and 350 MB in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]

from everystep.server.raw_lines import raw_lines

BATCH_LINES = 256
"""Lines of a batch: many times the rows of an engine, so that its steps stay full."""


def spans_of(source: Path, done: int) -> Iterator[dict[str, Any]]:
    """Yield the stretches of a file whose lines have no row yet, of as many lines as a batch."""
    with source.open("rb") as file:
        at, number, first, start = 0, 0, done, 0
        for _ in raw_lines(file):
            if number == first and number >= done:
                start = at
            at, number = file.tell(), number + 1
            if number > done and number - first == BATCH_LINES:
                yield {"path": str(source), "start": start, "first": first, "count": BATCH_LINES}
                first = number
        if number > first:
            yield {"path": str(source), "start": start, "first": first, "count": number - first}


def lines_of_spans(batch: pa.Table) -> pa.Table:
    """Return the lines of stretches of files, with their numbers."""
    numbers: list[int] = []
    lines: list[bytes] = []
    for span in batch.to_pylist():
        with open(span["path"], "rb") as file:
            file.seek(span["start"])
            found = raw_lines(file)
            lines += [next(found) for _ in range(span["count"])]
        numbers += range(span["first"], span["first"] + span["count"])
    return pa.table({"number": pa.array(numbers), "line": pa.array(lines, pa.large_binary())})
