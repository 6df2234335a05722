"""`everystep generate` with a run in its hands: traced step by step, saved, gone on with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import everystep as es
from everystep.cli.terminal import note
from everystep.errors import RequestError

_in_hands = partial(typer.Option, rich_help_panel="A run in your hands")
_RIVALS = 5

Save = Annotated[
    Path | None,
    _in_hands(
        "--save", metavar="FILE", help="Save the run to FILE when it ends or is interrupted."
    ),
]
Resume = Annotated[
    Path | None, _in_hands("--resume", metavar="FILE", help="Continue the run in FILE.")
]
Trace = Annotated[
    Path | None, _in_hands("--trace", metavar="FILE", help="Write each step to FILE as JSON.")
]
NoStages = Annotated[
    bool,
    _in_hands("--no-record-stages", help="Leave what each processor did out of the record."),
]


def refuse_prompt(said: dict[str, Any]) -> None:
    """Raise RequestError for what would ask a run that goes on for another prompt or steering."""
    wrong = [name for name, value in said.items() if value]
    if wrong:
        what = "--resume continues a run that already has its prompt and its steering"
        do = "Leave it out, or leave --resume out"
        raise RequestError(f"{what}; got {', '.join(wrong)}", do=do)


def resumed(
    path: Path, model: Any, tokenizer: Any, again: dict[str, Any], changes: dict[str, Any]
) -> Any:
    """Return the run of a file, with other values of what was said now.

    `again`: what the file cannot hold.
    """
    run = es.resume(path, model, tokenizer, **again)
    if changes:
        run.set(**changes)
    return run


class WatchedRun:
    """The events of a run; each step is a line of `trace`, and in the end, or when it is
    interrupted, the run is in the file `save`."""

    def __init__(self, run: Any, tokenizer: Any, save: Path | None, trace: Path | None) -> None:
        self._run, self._tokenizer = run, tokenizer
        self._save, self._trace = save, trace
        self._opened = ExitStack()
        self._lines: Any = None

    def __enter__(self) -> WatchedRun:
        if self._trace is not None:
            opened = self._trace.open("w", encoding="utf-8")
            self._lines = self._opened.enter_context(opened)
        return self

    def __iter__(self) -> Iterator[Any]:
        for step in self._run:
            if self._lines is not None:
                document = _step_document(step, self._tokenizer)
                self._lines.write(json.dumps(document, ensure_ascii=False) + "\n")
                self._lines.flush()
            yield from step.events

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        with self._opened:
            if self._save is not None and (kind is None or interrupted):
                self._run.save(self._save)
        if self._save is not None and interrupted:
            note(f"saved; go on with --resume {self._save}")

    def results(self) -> list[list[Any]]:
        """Return every sequence as it ended."""
        found = self._run.result()
        return [found if isinstance(found, list) else [found]]


def _step_document(step: Any, tokenizer: Any) -> dict[str, Any]:
    """Return a step as JSON types.

    It has what was settled, who continued whom, and how the choice came about.
    """
    chosen = step.branches[0].tokens[:1] if step.branches else ()
    document = {
        "step": step.number,
        "tokens": list(step.tokens),
        "text": step.text,
        "finish_reason": None if step.finish is None else step.finish.kind,
        "branches": [
            {"parent": one.parent, "index": one.index, "tokens": list(one.tokens)}
            for one in step.branches
        ],
    }
    if chosen and step.scores is not None:
        (token,), scores = chosen, step.scores[0]
        document["changes"] = [
            {
                "processor": one.name,
                "before": _finite(one.before[0, token]),
                "after": _finite(one.after[0, token]),
            }
            for one in step.changes
        ]
        best = scores.topk(min(_RIVALS, len(scores))).indices.tolist()
        document["best"] = [
            {"token": one, "text": tokenizer.decode([one]), "score": _finite(scores[one])}
            for one in best
        ]
    return document


def _finite(value: Any) -> float | None:
    """Return a number that JSON has; None for one that it has not."""
    number = float(value)
    return number if abs(number) < float("inf") else None
