"""Writes docs/matrix.md from the tables of the matrix: `python -m tests.matrix.page`."""

from __future__ import annotations

import inspect

from tests.faces.tight import SUBJECTS
from tests.matrix.columns import COLUMNS, Check
from tests.matrix.models import ON_MODELS
from tests.matrix.on_models import FEATURES_ON_MODELS, REFUSED_ON_MODELS, TightCheck
from tests.matrix.rows import APART, REFUSED, ROWS
from tests.reading import ROOT

PAGE = ROOT / "docs" / "matrix.md"
_HEAD = """\
# What goes with what

Every strategy with every feature. This page is written by `python -m tests.matrix.page` from the
tables in `tests/matrix`, and a test fails when it is out of date. `tests/matrix/test_cells.py`
tries each cell on a tiny real model:

- **yes**: what comes out equals the strategy's textbook loop, a whole forward per token without
  cache or engine, or the same call without the feature; and the feature was seen to do something.
- **no**: the call is refused, with a reason, before anything is computed.
- **–**: the two have no meaning together.
"""


_MODELS = """
## On which models

Here all but one answer are ruled out: by `choices`, by `allowed_sequences`, by a function of
prefixes that allows one token, or because each token ends the text. Each strategy says that answer
on each executor that a model has.

"""
_FEATURES = """

And each feature there, with each strategy that the model has and that goes with the feature. The
one answer is that of `choices`. Each check but those of speculation and preemption sees the feature
do something, such as come to another answer of two, or change how likely the answer is.

"""
_HOW = """

On the models, where one answer is left:

"""
_TRIED = """
## What a feature was tried with

"""


def page() -> str:
    """The text of the page."""
    names = [row.name for row in ROWS]
    notes: list[str] = []

    def noted(why: str) -> str:
        if why not in notes:
            notes.append(why)
        return f"[{notes.index(why) + 1}]"

    def cell(strategy: str, feature: str) -> str:
        place = strategy, feature
        if place in APART:
            return f"– {noted(APART[place])}"
        return f"no {noted(REFUSED[place].why)}" if place in REFUSED else "yes"

    def on(strategy: str, model: str) -> str:
        refusal = ON_MODELS.get((strategy, model))
        return "yes" if refusal is None else f"no {noted(refusal.why)}"

    lines = [_row("feature", *names), _row(*["---"] * (len(names) + 1))]
    lines += [_row(feature, *(cell(name, feature) for name in names)) for feature in COLUMNS]
    table, count = "\n".join(lines), len(ROWS) * len(COLUMNS)
    models = [_row("model", *names), _row(*["---"] * (len(names) + 1))]
    models += [_row(name, *(on(strategy, name) for strategy in names)) for name in SUBJECTS]
    told = f"Of {count} cells {count - len(APART)} have a meaning; {len(REFUSED)} are refused."
    tried = "\n".join(f"- {name}: {_said(check)}" for name, check in COLUMNS.items())
    on_models = _MODELS + "\n".join(models)

    def beside(feature: str, model: str) -> str:
        refusal = REFUSED_ON_MODELS.get((feature, model))
        return "yes" if refusal is None else f"no {noted(refusal.why)}"

    kinds = [_row("feature", *SUBJECTS), _row(*["---"] * (len(SUBJECTS) + 1))]
    kinds += [_row(one, *(beside(one, kind) for kind in SUBJECTS)) for one in FEATURES_ON_MODELS]
    on_models += _FEATURES + "\n".join(kinds)
    there = "\n".join(f"- {one}: {_said(how)}" for one, how in FEATURES_ON_MODELS.items())
    footnotes = "\n".join(f"{place}. {why}." for place, why in enumerate(notes, 1))
    return f"{_HEAD}\n{table}\n\n{told}\n{on_models}\n\n{footnotes}\n{_TRIED}{tried}{_HOW}{there}\n"


def _said(check: Check | TightCheck) -> str:
    """The docstring of a check, on one line."""
    return " ".join((inspect.getdoc(check) or "").split())


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
