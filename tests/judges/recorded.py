"""Replays a record from its numbers alone, and compares it with the textbook's prefixes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from everystep.engine.recording import RunRecorder
from everystep.errors import InvariantError
from everystep.records import (
    Record,
    RecordedRow,
    RecordedRun,
    RecordedStep,
    RecordWriter,
    read_record,
)
from everystep.strategies import Beam, Greedy
from everystep.testing.hash_function import HashFunction
from everystep.types import Request
from tests.judges.dice import EMBED_DIM
from tests.judges.mixes import Mix
from tests.judges.prefix import Prefix

CLOSE = 1e-5
NOT_OF_PROCESSORS = {"log_softmax", "guidance", "dola", "contrast", "hooks", "drafts"}
Check = Callable[[Request, RecordedRun, RecordedStep, RecordedRow, list[int]], None]


def watched(requests: Iterable[Request], file: Path, *, stages: bool = True) -> tuple[Request, ...]:
    """The requests with their steps written to the file, but for each third one."""
    writer = RecordWriter(file, stages=stages)
    return tuple(
        request if i % 3 == 2 else replace(request, watcher=_recorder(writer, request))
        for i, request in enumerate(requests)
    )


def _recorder(writer: RecordWriter, request: Request) -> RunRecorder:
    about = {"prompt": [], "request": request.request_id, "every_stage": writer.stages}
    return RunRecorder(writer, ("model", "none"), about, None)


def check(mix: Mix, file: Path, textbook: Check | None = None) -> dict[str, int]:
    """The numbers of each choice lead to its tokens; how often each stage was seen."""
    record, seen = read_record(file), dict[str, int]()
    requests = {request.request_id: request for request in mix.requests}
    for run in record.runs.values():
        request = requests[str(run.about["request"])]
        _check_run(request, run, seen, textbook or _of_textbook(mix))
    return seen


def _check_run(request: Request, run: RecordedRun, seen: dict[str, int], textbook: Check) -> None:
    lines: dict[int, list[int]] = {index: [] for index in range(request.strategy.width)}
    for step in run.steps:
        for row in step.rows:
            own = lines[row.of]
            child = next((one for one in step.children if one.parent == row.of), None)
            drafted = list(child.ids[: row.at - len(own)]) if child is not None else []
            tokens = [*own, *drafted]
            if row.at != len(tokens):
                raise InvariantError("a row is elsewhere", wanted=len(tokens), got=row.at)
            _replay(request, step, row)
            textbook(request, run, step, row, tokens)
            for stage in row.stages:
                seen[stage.name] = seen.get(stage.name, 0) + 1
        if step.children:
            live = [one for one in step.children if one.end is None]
            lines |= {one.index: [*lines[one.parent], *one.ids] for one in live}


def _replay(request: Request, step: RecordedStep, row: RecordedRow) -> None:
    """What was chosen follows from the scores, and from what was drawn."""
    scores = {id: value for id, value in zip(row.ids, row.scores, strict=True) if value is not None}
    if row.chosen is None:
        return
    # A search keeps as many beams as it is wide, those of no probability too.
    wrong = request.strategy.streams and row.chosen not in scores
    if isinstance(request.strategy, Greedy):
        best = max(scores.values())
        wrong |= row.chosen != min(id for id, value in scores.items() if value == best)
    if row.draw is not None:
        share = math.exp(scores[row.chosen] - (row.totals[1] or 0.0))
        wrong |= not row.draw.low - CLOSE <= row.draw.number <= row.draw.high + CLOSE
        wrong |= not math.isclose(share, row.draw.high - row.draw.low, abs_tol=CLOSE)
    if type(request.strategy) is Beam and not request.strategy.sampled:
        wrong |= _beam_differs(request, step, row, scores)
    if wrong:
        raise InvariantError("a choice does not follow from its record", got=(request, row))


def _beam_differs(
    request: Request, step: RecordedStep, row: RecordedRow, scores: dict[int, float]
) -> bool:
    """Tell whether a live child's score is not that of its parent and its token together."""
    live = [one for one in step.children if one.parent == row.of and one.end is None]
    return any(
        row.score is not None
        and one.score is not None
        and not math.isclose(row.score + scores[one.ids[0]], one.score, rel_tol=1e-4, abs_tol=1e-3)
        for one in live
        if one.ids and one.ids[0] in scores and one.score is not None and one.score > -1e6
    )


def _of_textbook(mix: Mix) -> Check:
    """The logits and scores of each row equal those of a loop without cache, batch or engine."""
    function = HashFunction(mix.vocab_size, EMBED_DIM)
    prefixes = {one.request_id: Prefix(one, function) for one in mix.requests}

    def compare(
        request: Request,
        run: RecordedRun,
        step: RecordedStep,
        row: RecordedRow,
        tokens: list[int],
    ) -> None:
        prefix = prefixes[request.request_id]
        raw = prefix.raw(tokens)
        alike = all(
            value is None or math.isclose(value, float(raw[id]), abs_tol=CLOSE)
            for id, value in zip(row.ids, row.logits, strict=True)
        )
        by_chance = any(one.name == "drafts" for one in row.stages)
        if request.strategy.rounds == 1 and not by_chance:
            book = prefix.scores(tokens)
            alike &= all(
                math.isclose(-math.inf if value is None else value, float(book[id]), abs_tol=CLOSE)
                for id, value in zip(row.ids, row.scores, strict=True)
            )
        if request.strategy.rounds == 1 and run.about.get("every_stage") is not False:
            alike &= _stages_agree(prefix.stages(tokens), row)
        if not alike:
            raise InvariantError("a record is not the textbook's", wanted=raw, got=(request, row))

    return compare


def _stages_agree(book: list[Tensor] | None, row: RecordedRow) -> bool:
    """Tell whether each processor left the textbook's scores, and ruled out as many."""
    if book is None:
        return True
    stages = [one for one in row.stages if one.name not in NOT_OF_PROCESSORS]
    found = len(stages) == len(book) - 1
    for stage, before, after in zip(stages, book, book[1:], strict=False):
        gone = int(((after == -torch.inf) & (before != -torch.inf)).sum())
        found &= stage.removed == gone
        found &= all(
            math.isclose(-math.inf if value is None else value, float(after[id]), abs_tol=CLOSE)
            for id, value in zip(row.ids, stage.values, strict=True)
        )
    return found


def texts(record: Record) -> list[list[int]]:
    """The ids of the first sequence of every run."""
    return [run.tokens.get(0, []) for run in record.runs.values()]
