"""From the logits of a step to one batch of scores per kind of strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from torch import Tensor

from everystep.draws import fork_lineage
from everystep.engine.feed import Fed, columns_of
from everystep.engine.readout import best_scores, log_probs
from everystep.engine.records import History
from everystep.processors.best import told
from everystep.processors.pipeline import shortened
from everystep.stops.base import Candidates
from everystep.stops.check import check
from everystep.strategies.base import Batch, Check, Drafts
from everystep.types import (
    Best,
    Companion,
    FinishReason,
    Group,
    Rows,
    Sequence,
    Shortlist,
    StepOutput,
    TokenTable,
)
from everystep.types.shortlist import dense


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A batch with its rows: raw logits (R, V) float32, and what processors left of them.

    `best`: what a strategy is told in their place where that is enough; then they are (0, V).
    """

    batch: Batch
    logits: Tensor
    processed: Tensor | Shortlist
    best: Best | None = None

    @property
    def scores(self) -> Tensor:
        """(R, V) float32 processed scores."""
        return dense(self.processed)

    def pick(self) -> tuple[Tensor, ...]:
        """What the strategy reduces the scores to."""
        strategy = self.batch.groups[0].request.strategy
        return strategy.pick(self.batch, self.processed if strategy.shortlists else self.scores)

    def pick_best(self, best: Best) -> tuple[np.ndarray, ...]:
        """The same of the best scores."""
        picked: tuple[np.ndarray, ...] = self.batch.groups[0].request.strategy.pick_best(
            self.batch, best
        )
        return picked


def score(
    groups: list[Group],
    fed: Fed,
    output: StepOutput,
    table: TokenTable,
    submitted: int,
    history: History,
    *,
    whole: bool = False,
) -> Scored:
    """Groups of one kind -> their batch, with the scores that its strategy asks for.

    `submitted`: how many groups the engine was ever given; the full rectangle has as many. The
    scores become part of the `history` if its criteria want to read it. `whole`: the rows are there
    also where the groups are told the best of them; UndecidedError where those did not suffice.
    """
    read = history if groups[0].request.wants.history else None
    batch, source_rows = _gather(groups, fed, output, table, submitted, read)
    request = groups[0].request
    if groups[0].best and not whole:
        return _score_best(batch, source_rows[0], output, table)
    logits = _take(output.logits, source_rows[0])
    mixed = logits
    if request.readout is not None:
        companions = [_take(output.logits, rows) for rows in source_rows[1:]]
        mixed = request.readout.mix(logits, companions)
    if request.strategy.scores == "log_probs":
        mixed = log_probs(mixed, None if mixed is not logits else _totals(output, source_rows[0]))
    scores: Tensor | Shortlist = mixed
    if any(group.request.processors for group in groups):
        scores = shortened(_rows(batch, table), mixed, owned=mixed is not logits)
    if read is not None:
        read.show(dense(scores), drafted=int(batch.row_count.sum()) > len(batch))
    return Scored(batch, logits, scores)


def _score_best(batch: Batch, rows: np.ndarray, output: StepOutput, table: TokenTable) -> Scored:
    """The batch with what it was told of the best of its rows, those of `output.best`."""
    counts = np.array([group.best for group in batch.groups])[batch.group_of[batch.row_sequence]]
    best = cast(Best, output.best).select(rows, int(counts.max()))
    none = output.logits[:0] if len(output.logits) else output.logits
    strategy = batch.groups[0].request.strategy
    if strategy.shortlists:
        short = told(best, counts, batch.vocabulary)
        return Scored(batch, none, shortened(_rows(batch, table), short))
    logs = strategy.scores == "log_probs"
    return Scored(batch, none, none, best_scores(best, log_probs=logs))


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
        columns=lambda s: columns_of(sources[s]),
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


def _stops(sequences: list[Sequence], table: TokenTable, history: History | None) -> Check:
    def stops(
        parents: np.ndarray, tokens: np.ndarray, counts: np.ndarray
    ) -> tuple[np.ndarray, list[FinishReason | None]]:
        chosen = Candidates(table, [sequences[p] for p in parents.tolist()], tokens, counts)
        if history is not None:
            chosen = replace(chosen, steps=history.steps, settled=history.settled)
        return check(chosen)

    return stops
