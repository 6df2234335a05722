"""Records as one page: a file that opens from disk, alone, and asks nobody for anything.

The records lie in it compressed, as data. The script makes all text by `textContent`, and the
page's policy allows these scripts and this style alone, by their digests.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from itertools import islice
from pathlib import Path

from everystep.files.atomic import write_atomic
from everystep.inspector import views
from everystep.inspector.paths import choosing, newest
from everystep.records import Record, RecordedRow, RecordedStep

Titled = tuple[str, Record]
_HEAD = "default-src 'none'; script-src {}; style-src '{}'; base-uri 'none'; form-action 'none'"
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
<body class="everystep">
<main id="page"><p id="state" role="status">Opening the record.</p></main>
<noscript><p>This page needs its script to show the record.</p></noscript>
<script type="application/json" id="record">{data}</script>
<script>{script}</script>
<script>{opening}</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """Return the text of a script or a style of the page."""
    return (files("everystep.inspector") / name).read_text(encoding="utf-8")


def write_page(record: Record, target: Path, title: str, other: Titled | None = None) -> None:
    """Write the page of a record, or of two that are compared, whole or not at all."""
    write_atomic(target, page(record, title, other).encode())


def page(record: Record, title: str, other: Titled | None = None) -> str:
    """Return the page of a record, or of two that are compared."""
    script, opening, style = asset("page.js"), asset("opened.js"), asset("page.css")
    said = json.dumps(document(record, title, other), separators=(",", ":"), allow_nan=False)
    scripts = f"'{_digest(script)}' '{_digest(opening)}'"
    policy = f"{_HEAD.format(scripts, _digest(style))}; require-trusted-types-for 'script'"
    return _PAGE.format(
        policy=html.escape(policy),
        title=html.escape(views.marked(title)),
        style=style,
        script=script,
        opening=opening,
        data=base64.b64encode(gzip.compress(said.encode(), 6, mtime=0)).decode(),
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def document(
    record: Record, title: str, other: Titled | None = None, *, whole: bool = True
) -> dict[str, object]:
    """Return what the script shows, as JSON: texts have their marks already.

    `whole`: with every step; without, each run has the number of its steps, for pages that ask for
    them by window.
    """
    shown = [(title, record)] if other is None else [(title, record), other]
    runs: list[dict[str, object]] = []
    for place, (name, one) in enumerate(shown):
        prefix = "" if other is None else f"{views.marked(name)}: "
        runs += _runs(one, place, len(runs), prefix, whole=whole)
    return {
        "title": " and ".join(views.marked(name) for name, _ in shown),
        "texts": [{str(id): views.spelled(one, id) for id in one.texts} for _, one in shown],
        "runs": runs,
        "cut": any(one.cut for _, one in shown),
        "comparison": None if other is None else _comparison(record, other[1]),
    }


def _runs(
    record: Record, place: int, first: int, prefix: str, *, whole: bool
) -> list[dict[str, object]]:
    """Return the runs of the record at this place, the first of which has this number."""
    steps = [choosing(run) for run in record.runs.values()]
    places = {
        id(row): ((first + r, i, j), step)
        for r, own in enumerate(steps)
        for i, step in enumerate(own)
        for j, row in enumerate(step.rows)
    }
    nowhere = (first, -1, -1), None
    found = []
    for r, run in enumerate(record.runs.values()):
        start = run.about.get("first_position")
        sequences = {
            str(index): [
                _token(one, *places.get(id(one.row), nowhere))
                for one in views.tokens_of(record, run, index)
            ]
            for index in sorted(run.tokens)
        }
        found.append(
            {
                "name": f"{prefix}{views.marked(run.name)}",
                "record": place,
                "heading": views.heading(record, run),
                "prompt": list(run.prompt),
                "first": start if type(start) is int else 0,
                "sequences": sequences,
                "unseen": {str(index): views.unseen(record, run, index) for index in run.tokens},
                "steps": [*map(shown_step, steps[r])] if whole else len(steps[r]),
                "ends": views.ends(record, run),
                "tree": views.forest(record, run),
            }
        )
    return found


def growth(record: Record, name: str, tokens: int, texts: int) -> dict[str, object] | None:
    """Return what has come to a run of one sequence since it had so many tokens, and its record so
    many texts; None where these are not what its last steps chose."""
    run = record.runs[name]
    if [*run.tokens] != [0] or not 0 < tokens < len(run.tokens[0]) or run.ends:
        return None
    number, ids = [*record.runs].index(name), run.tokens[0]
    places = newest(run, tokens)
    if not {*range(tokens, len(ids))} <= {*places}:
        return None
    new = []
    for at in range(tokens, len(ids)):
        index, i, j = places[at]
        step = run.steps[index]
        one = views.token_of(record, run, at, ids[at], step.rows[j])
        new.append(_token(one, (number, i, j), step))
    known = [(at, places[at][0]) for at in range(tokens, len(ids))]
    return {
        "run": number,
        "from": tokens,
        "tokens": new,
        "unseen": views.unseen_after(record, run, known),
        "texts": {str(id): views.spelled(record, id) for id in islice(record.texts, texts, None)},
    }


def _token(
    one: views.Token, place: tuple[int, int, int], step: RecordedStep | None
) -> list[object]:
    """Return id, surprise, origin, step, row, run, entropy, rank and milliseconds of a token, which
    was chosen in this place: run, step with choices, and row."""
    row, (r, i, j) = one.row, place
    spent = None if step is None else _rounded(step.spent * 1e3)
    rank = None if row is None or row.ranks is None else row.ranks[0]
    entropy = None if row is None else _rounded(row.entropies[0])
    return [one.id, _rounded(one.surprise), one.origin, i, j, r, entropy, rank, spent]


def shown_step(step: RecordedStep) -> dict[str, object]:
    """Return a step as the script shows it."""
    return {
        "rows": [_row(row) for row in step.rows],
        "drafts": [
            [one.of, list(one.ids), one.right, views.instead(step, one)] for one in step.drafts
        ],
        "lost": [
            [one.of, one.id, _rounded(one.score), _rounded(one.least)] for one in views.lost(step)
        ],
        "fed": views.fed_lines(step),
        "seconds": _seconds(step.seconds),
        "beside": step.beside,
    }


def _comparison(record: Record, other: Record) -> dict[str, object]:
    """Return what differs, and for each pair of runs the first other token."""
    pairs = []
    both = zip(record.runs.values(), other.runs.values(), strict=False)
    for number, (one, two) in enumerate(both):
        mine = one.tokens.get(min(one.tokens, default=0), [])
        theirs = two.tokens.get(min(two.tokens, default=0), [])
        at = views.common(mine, theirs)
        pairs.append({"one": number, "other": len(record.runs) + number, "at": at})
    return {"lines": [*views.comparison(record, other)], "pairs": pairs}


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
