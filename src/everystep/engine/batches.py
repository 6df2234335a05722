"""From the logits of a step to one batch of scores per kind of strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from everystep.draws import fork_lineage
from everystep.engine.feed import Fed
from everystep.engine.records import History
from everystep.processors.pipeline import apply
from everystep.stops.base import Candidates
from everystep.stops.check import check
from everystep.strategies.base import Batch, Check, Drafts
from everystep.types import (
    Companion,
    FinishReason,
    Group,
    Rows,
    Scores,
    Sequence,
    StepOutput,
    TokenTable,
)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A batch with its rows: raw logits (R, V) float32, and what processors left of them.

    The logits are (0, V) where only the best of the rows were reported.
    """

    batch: Batch
    logits: Tensor
    scores: Scores


def score(
    groups: list[Group],
    fed: Fed,
    output: StepOutput,
    table: TokenTable,
    submitted: int,
    history: History,
) -> Scored:
    """Groups of one kind -> their batch, with the scores that its strategy asks for.

    `submitted`: how many groups the engine was ever given; the full rectangle has as many. The
    scores become part of the `history` if its criteria want to read it.
    """
    read = history if groups[0].request.wants.history else None
    batch, source_rows = _gather(groups, fed, output, table, submitted, read)
    request = groups[0].request
    if groups[0].best and output.best is not None:
        logits = output.logits[:0]
        given = mixed = _reported(batch, source_rows[0], output.best)
    else:
        logits = _take(output.logits, source_rows[0])
        given = mixed = Scores.of(logits, _totals(output, source_rows[0]))
    if request.readout is not None:
        companions = [_take(output.logits, rows) for rows in source_rows[1:]]
        mixed = Scores.of(request.readout.mix(logits, companions))
    if request.strategy.reads.scores == "log_probs":
        mixed = mixed.log_probs()
    scores = mixed
    if any(group.request.processors for group in groups):
        scores = apply(_rows(batch, table), mixed, owned=mixed is not given)
    if read is not None:
        read.show(scores.whole().values, drafted=int(batch.row_count.sum()) > len(batch))
    return Scored(batch, logits, scores)


def _reported(batch: Batch, rows: np.ndarray, best: Scores) -> Scores:
    """The lists that were reported of the batch's rows, each as long as its group needs."""
    return best.select(torch.from_numpy(rows), max(group.best for group in batch.groups))


def _gather(
    groups: list[Group],
    fed: Fed,
    output: StepOutput,
    table: TokenTable,
    submitted: int,
    history: History | None,
) -> tuple[Batch, list[np.ndarray]]:
    """The batch, and for the sequences and each companion the row of logits behind every row."""
    sequences: list[Sequence] = []
    sources: list[Sequence] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        members = group.live if group.opened else open_group(group)
        sequences += members
        sources += group.live if group.opened else group.live * len(members)
        group_of += [g] * len(members)
    drafts: Drafts = [fed.draft(source) for source in sources]
    counts = [1 + len(draft) for draft in drafts]
    width = max([group.request.strategy.width for group in groups])
    batch = Batch(
        groups=groups,
        sequences=sequences,
        group_of=np.array(group_of),
        first_row=np.array([*accumulate(counts, initial=0)][:-1], dtype=np.int64),
        row_count=np.array(counts, dtype=np.int64),
        drafts=drafts,
        table=table,
        slots_per_group=width,
        slots=submitted * width,
        draws=groups[0].request.draws,
        vocabulary=output.logits.shape[-1],
        columns=_columns(sources, output.columns),
        stops=_stops(sequences, table, history),
    )
    return batch, [_source_rows(units, fed, batch) for units in _units(sources)]


def open_group(group: Group) -> list[Sequence]:
    """The siblings a group opens with: equal but for rank, score and lineage."""
    (source,) = group.live
    strategy = group.request.strategy
    source.score = strategy.opening_score(0)
    siblings = [source]
    for index in range(1, strategy.width):
        lineage = fork_lineage(source.lineage, 0, index)
        siblings.append(sprout(source, source.line, lineage, index))
        siblings[-1].score = strategy.opening_score(index)
    return siblings


def sprout(parent: Sequence, line: int, lineage: int, index: int) -> Sequence:
    """A sequence like `parent`, with its own memory, on the given line."""
    return Sequence(
        request=parent.request,
        line=line,
        length=parent.length,
        cached=parent.cached,
        row=parent.row,
        score=parent.score,
        lineage=lineage,
        index=index,
        provisional=parent.provisional,
        finish=parent.finish,
        memo={key: copy_memory(value) for key, value in parent.memo.items()},
        companions=parent.companions,
    )


def copy_memory(value: object) -> object:
    """An independent copy of something remembered; values without `copy` are immutable."""
    copy = getattr(value, "copy", None)
    return copy() if callable(copy) else value


def _units(sources: list[Sequence]) -> list[list[Sequence] | list[Companion]]:
    """The sequences, then the first companion of each, and so on."""
    companions = range(len(sources[0].companions))
    return [sources, *([source.companions[k] for source in sources] for k in companions)]


def _source_rows(units: list[Sequence] | list[Companion], fed: Fed, batch: Batch) -> np.ndarray:
    first = np.array([fed.first_row[id(unit)] for unit in units], dtype=np.int64)
    if not fed.drafts:
        return first
    count = batch.row_count
    return np.repeat(first - batch.first_row, count) + np.arange(int(count.sum()))


def _take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """(R, V) float32 rows; without a copy where they are a block of all logits."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        chosen = logits[first : first + len(rows)]
    else:
        chosen = logits[torch.from_numpy(rows).to(logits.device)]
    return chosen.to(torch.float32)


def _totals(output: StepOutput, rows: np.ndarray) -> Tensor | None:
    """(R,) of the given rows of logits, where the executor told them."""
    return None if output.totals is None else output.totals[torch.from_numpy(rows)]


def _rows(batch: Batch, table: TokenTable) -> Rows:
    owner = batch.row_sequence
    owners = [batch.sequences[s] for s in owner.tolist()]
    visible = np.array([s.visible for s in owners], dtype=np.int64)
    return Rows(table, owners, visible + np.arange(len(owner)) - batch.first_row[owner])


def _columns(sources: list[Sequence], columns: Mapping[int, Tensor]):  # type: ignore[no-untyped-def]
    def column(s: int) -> Tensor:
        row = sources[s].row
        return columns[row]  # type: ignore[index]

    return column


def _stops(sequences: list[Sequence], table: TokenTable, history: History | None) -> Check:
    def stops(
        parents: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, list[FinishReason | None]]:
        chosen = Candidates(table, [sequences[p] for p in parents.tolist()], tokens, counts)
        if history is not None:
            chosen = replace(chosen, steps=history.steps, settled=history.settled)
        return check(chosen)

    return stops
