"""A record as one page: a file that opens from disk, alone, and asks nobody for anything.

The record lies in it compressed, as data. The script makes all text by `textContent`, and the
page's policy allows this script and this style alone, by their digests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from everystep.files.atomic import write_atomic
from everystep.inspector import views
from everystep.inspector.paths import choosing
from everystep.records import Record, RecordedRow, RecordedRun

_HEAD = "default-src 'none'; script-src '{}'; style-src '{}'; base-uri 'none'; form-action 'none'"
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="page"><p id="state" role="status">Opening the record.</p></main>
<noscript><p>This page needs its script to show the record.</p></noscript>
<script type="application/json" id="record">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def write_page(record: Record, target: Path, title: str) -> None:
    """Write the page of a record, whole or not at all."""
    write_atomic(target, page(record, title).encode())


def page(record: Record, title: str) -> str:
    """Return the page of a record."""
    assets = files("everystep.inspector")
    script = (assets / "page.js").read_text(encoding="utf-8")
    style = (assets / "page.css").read_text(encoding="utf-8")
    said = json.dumps(document(record, title), separators=(",", ":"), allow_nan=False)
    return _PAGE.format(
        policy=html.escape(
            f"{_HEAD.format(_digest(script), _digest(style))}; require-trusted-types-for 'script'"
        ),
        title=html.escape(views.marked(title)),
        style=style,
        script=script,
        data=base64.b64encode(gzip.compress(said.encode(), 6, mtime=0)).decode(),
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def document(record: Record, title: str) -> dict[str, object]:
    """Return what the script shows, as JSON: texts have their marks already."""
    return {
        "title": views.marked(title),
        "texts": {str(id): views.spelled(record, id) for id in record.texts},
        "runs": [_run(record, run) for run in record.runs.values()],
        "cut": record.cut,
    }


def _run(record: Record, run: RecordedRun) -> dict[str, object]:
    steps = choosing(run)
    places = {id(row): (i, j) for i, step in enumerate(steps) for j, row in enumerate(step.rows)}
    sequences = {}
    for index in sorted(run.tokens):
        tokens = views.tokens_of(record, run, index)
        sequences[str(index)] = [
            [one.id, _rounded(one.surprise), one.origin, *places.get(id(one.row), (-1, -1))]
            for one in tokens
        ]
    first = run.about.get("first_position")
    return {
        "name": views.marked(run.name),
        "heading": views.heading(record, run),
        "prompt": list(run.prompt),
        "first": first if type(first) is int else 0,
        "sequences": sequences,
        "steps": [
            {
                "rows": [_row(row) for row in step.rows],
                "drafts": [[one.of, list(one.ids), one.right] for one in step.drafts],
                "fed": [[one.of, one.start, one.count] for one in step.fed],
                "seconds": _seconds(step.seconds),
                "beside": step.beside,
            }
            for step in steps
        ],
        "ends": views.ends(record, run),
        "tree": views.tree(record, run),
    }


def _row(row: RecordedRow) -> dict[str, object]:
    draw = row.draw
    return {
        "of": row.of,
        "at": row.at,
        "chosen": row.chosen,
        "ids": list(row.ids),
        "logits": [_rounded(one) for one in row.logits],
        "stages": [
            [views.stage_name(one.name), one.removed, [_rounded(value) for value in one.values]]
            for one in row.stages
        ],
        "totals": [_rounded(one) for one in row.totals],
        "entropies": [_rounded(one) for one in row.entropies],
        "rank": None if row.ranks is None else row.ranks[0],
        "draw": None if draw is None else [draw.number, draw.low, draw.high],
        "ends": [[one.id, _rounded(one.score), one.rank] for one in row.ends],
    }


def _seconds(seconds: Mapping[str, float]) -> dict[str, float | None]:
    return {views.marked(name): _rounded(value) for name, value in seconds.items()}


def _rounded(value: float | None) -> float | None:
    """Return a number in six digits; None where there is none that JSON has."""
    return None if value is None or abs(value) == float("inf") else float(f"{value:.6g}")
