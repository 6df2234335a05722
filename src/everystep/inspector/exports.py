"""A record for other programs: series as CSV or Parquet, times as a trace of Perfetto."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from everystep.errors import MissingExtraError, RequestError
from everystep.files.atomic import write_atomic
from everystep.inspector import views
from everystep.inspector.page import write_page
from everystep.inspector.paths import choosing
from everystep.records import Record, RecordedRow, RecordedStep

Cell = str | int | float | None
COLUMNS = (
    *("run", "sequence", "at", "id", "text", "origin", "surprise", "logit", "score"),
    *("entropy", "entropy_after", "rank", "rank_after", "draw", "ruled_out"),
    *("end_share", "step", "milliseconds"),
)
"""The columns of a series: one row for each token of each sequence of each run."""
_WHOLE = ("sequence", "at", "id", "rank", "rank_after", "ruled_out", "step")
_TEXTS = ("run", "text", "origin")


def export(record: Record, target: Path, title: str) -> None:
    """Write a record in the form that the ending of a file names."""
    write = FORMS.get(target.suffix.lower())
    if write is None:
        raise RequestError(
            f"{target.name} has no ending of a form that records are written in",
            wanted=", ".join(FORMS),
            got=target.suffix or "no ending",
            do="Name a file of one of these: a page, a series, a trace of Perfetto",
        )
    write(record, target, title)


def rows(record: Record) -> Iterator[tuple[Cell, ...]]:
    """Yield the rows of the series, in the order of `COLUMNS`."""
    for run in record.runs.values():
        steps = {
            id(row): (number, step)
            for number, step in enumerate(choosing(run))
            for row in step.rows
        }
        for index in sorted(run.tokens):
            for one in views.tokens_of(record, run, index):
                place = None if one.row is None else steps.get(id(one.row))
                text = record.spell(one.id)
                begun: tuple[Cell, ...] = (run.name, index, one.at, one.id, text, one.origin)
                yield (*begun, one.surprise, *_numbers(one.row, one.id), *_times(place))


def _numbers(row: RecordedRow | None, token: int) -> tuple[Cell, ...]:
    """Return the numbers of a choice; None for each where nothing was chosen."""
    if row is None:
        return (None,) * 9
    place = row.ids.index(token) if token in row.ids else None
    logit = None if place is None else row.logits[place]
    score = None if place is None else row.scores[place]
    ranks = (None, None) if row.ranks is None else row.ranks
    draw = None if row.draw is None else row.draw.number
    gone = sum(stage.removed for stage in row.stages)
    total = row.totals[0]
    known = [one.logit - total for one in row.ends if one.logit is not None and total is not None]
    ends = sum(views.share_of(one) for one in known) if row.ends else None
    return (logit, score, *row.entropies, *ranks, draw, gone, ends)


def _times(place: tuple[int, RecordedStep] | None) -> tuple[Cell, Cell]:
    if place is None:
        return None, None
    number, step = place
    return number, step.spent * 1e3


def _write_csv(record: Record, target: Path, title: str) -> None:
    """Write the series as CSV; texts as JSON strings, which no program of tables takes for a
    formula."""
    text = COLUMNS.index("text")
    opened = io.StringIO()
    lines = csv.writer(opened)
    lines.writerow(COLUMNS)
    for row in rows(record):
        cells = ["" if cell is None else cell for cell in row]
        cells[0] = views.marked(str(cells[0])).lstrip("=+-@")
        cells[text] = json.dumps(cells[text])
        lines.writerow(cells)
    write_atomic(target, opened.getvalue().encode())


def _write_parquet(record: Record, target: Path, title: str) -> None:
    """Write the series as Parquet."""
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtraError.of("a series as Parquet", "pyarrow", "train") from error
    columns = [*zip(*rows(record), strict=True)] or [()] * len(COLUMNS)
    kinds = [
        arrow.string() if name in _TEXTS else arrow.int64() if name in _WHOLE else arrow.float64()
        for name in COLUMNS
    ]
    held = [
        arrow.array([None if one is None else _fitting(one) for one in column], kind)
        for column, kind in zip(columns, kinds, strict=True)
    ]
    opened = io.BytesIO()
    parquet.write_table(arrow.table(held, names=[*COLUMNS]), opened)
    write_atomic(target, opened.getvalue())


def _fitting(value: Cell) -> Cell:
    """Return a value as Parquet has it: halves of characters are no text."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _write_trace(record: Record, target: Path, title: str) -> None:
    """Write phases of steps as a trace of Perfetto and chrome://tracing, one track for each run.

    A record has how long things took and not when: steps follow each other without a gap.
    """
    events: list[dict[str, object]] = []
    for track, run in enumerate(record.runs.values(), 1):
        named = {"name": f"run {views.marked(run.name)}"}
        events.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": named})
        now = 0.0
        for step in run.steps:
            began = now
            for phase, seconds in step.seconds.items():
                place = {"ph": "X", "pid": 1, "tid": track, "ts": now, "dur": seconds * 1e6}
                events.append({**place, "name": views.marked(phase), "cat": "phase"})
                now += seconds * 1e6
            said = [row.chosen for row in step.rows if row.chosen is not None]
            text = "".join(views.spelled(record, id) for id in said)
            facts = {"tokens": text, "fed": sum(one.count for one in step.fed)}
            place = {"ph": "X", "pid": 1, "tid": track, "ts": began, "dur": now - began}
            whole = {"name": f"step {step.number}", "cat": "step"}
            events.append({**place, **whole, "args": {**facts, "beside": step.beside}})
    found = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    write_atomic(target, json.dumps(found, allow_nan=False).encode())


FORMS: dict[str, Callable[[Record, Path, str], None]] = {
    ".html": write_page,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".json": _write_trace,
}
"""What writes a record, by the ending of the file."""
