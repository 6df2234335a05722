"""From the logits of a step to the choices of all groups whose strategies are equal.

A sequence with drafts stands here once per row of scores: as it is, and as it would be after each
draft. So a strategy that lets each sequence choose by itself chooses for all of them at once and
knows nothing of drafts; afterwards each sequence takes its choices for as long as they are the
drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.draws import fork_lineage
from everystep.engine.apply import sprout
from everystep.engine.feed import Fed, columns_of
from everystep.processors.pipeline import apply
from everystep.stops.check import check
from everystep.strategies.base import Batch
from everystep.types import (
    Children,
    Companion,
    FinishReason,
    Group,
    Rows,
    Scores,
    Sequence,
    StepOutput,
    TokenTable,
    is_memory,
)
from everystep.types.batch import Check
from everystep.types.candidates import Candidates

Picked = tuple[tuple[np.ndarray, ...], ...]
History = tuple[Tensor, ...]
"""The scores that a call chose from, (R, V) per step, for criteria that want to read them."""


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Groups that choose together: raw logits (R, V) float32, and what processors left of them.

    `sequences`: S of them; `owner` (R,): whose each row is; `first` (S,): the first row of each.
    `batch`: the R rows as sequences. The logits are (0, V) where only the best of the rows were
    reported. `shown`: the scores of all steps, for criteria.
    """

    batch: Batch
    sequences: list[Sequence]
    drafts: list[np.ndarray]
    first: np.ndarray
    owner: np.ndarray
    logits: Tensor
    scores: Scores
    shown: History

    @property
    def groups(self) -> list[Group]:
        """Those that choose."""
        return self.batch.groups

    @property
    def drafted(self) -> bool:
        """Whether any sequence has more than one row."""
        return len(self.batch) > len(self.sequences)

    def pick(self, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """What the strategy reduces the scores to in its next round."""
        return self.groups[0].request.strategy.pick(self.batch, self.scores, earlier)

    def select(self, picked: Picked) -> Children:
        """The children of the sequences."""
        children = self.groups[0].request.strategy.select(self.batch, picked)
        return _accepted(self, children) if self.drafted else children

    def of_sequences(self) -> Batch:
        """The S sequences, one row each, whatever their drafts."""
        if not self.drafted:
            return self.batch
        one = self.batch
        group_of, slot = one.group_of[self.first], one.slot[self.first]
        return Batch(
            one.groups, self.sequences, group_of, one.table, slot, one.slots, one.draws,
            one.vocabulary, one.columns, one.stops,
        )  # fmt: skip


def score(
    groups: list[Group],
    fed: Fed,
    output: StepOutput,
    table: TokenTable,
    submitted: int,
    history: History,
) -> Scored:
    """Groups with equal strategies -> the scores that these ask for.

    `submitted`: how many groups the engine has received so far; the full rectangle has as many. The
    scores follow the `history` where criteria want to read it.
    """
    request = groups[0].request
    sequences, group_of, sources = _members(groups)
    drafts = [fed.draft(source) for source in sources]
    counts = [1 + len(draft) for draft in drafts]
    first = np.array([*accumulate(counts, initial=0)][:-1], dtype=np.int64)
    owner = np.arange(len(sequences)).repeat(counts)
    rows = _source_rows(sources, fed, first, owner)
    lengths = [s.visible for s in sequences]
    visible = np.array(lengths, dtype=np.int64)[owner] + np.arange(len(owner)) - first[owner]
    seen = Rows(table, [sequences[s] for s in owner.tolist()], visible)
    logits, scores = _read(groups, rows, output, seen)
    shown: History = ()
    if request.wants.history:
        new = scores.whole().values
        shown = (*history, *(new[:, None] if len(owner) > len(sequences) else (new,)))
    reached = 1 + len(history) + np.arange(len(owner)) - first[owner]
    follow = _after_drafts(sequences, drafts)
    width = max([group.request.strategy.width for group in groups])
    drafted = len(follow) > len(sequences)
    slot = [groups[g].rank * width + s.index for g, s in zip(group_of, sequences, strict=True)]
    batch = Batch(
        groups=groups,
        sequences=follow,
        group_of=np.array(group_of, dtype=np.int64)[owner],
        table=table,
        slot=np.arange(len(follow)) if drafted else np.array(slot, dtype=np.int64),
        slots=len(follow) if drafted else width * submitted,
        draws=request.draws,
        vocabulary=output.logits.shape[-1],
        columns=lambda s: columns_of(sources[s]),
        stops=_stops(follow, table, shown or None, reached),
    )
    return Scored(batch, sequences, drafts, first, owner, logits, scores, shown)


def _read(
    groups: list[Group], rows: list[np.ndarray], output: StepOutput, seen: Rows
) -> tuple[Tensor, Scores]:
    """(R, V) raw logits, and the scores that become of them; or none, and the best of the rows."""
    request = groups[0].request
    if groups[0].best and output.best is not None:
        logits = output.logits[:0]
        most = max([group.best for group in groups])
        given = mixed = output.best.select(torch.from_numpy(rows[0]), most)
    else:
        logits = _take(output.logits, rows[0])
        given = mixed = Scores.of(logits, _totals(output, rows[0]))
    if request.readout is not None:
        companions = [_take(output.logits, one) for one in rows[1:]]
        mixed = Scores.of(request.readout.mix(logits, companions))
    if request.strategy.reads.scores == "log_probs":
        mixed = mixed.log_probs()
    if any(group.request.processors for group in groups):
        return logits, apply(seen, mixed, owned=mixed is not given)
    return logits, mixed


def _members(groups: list[Group]) -> tuple[list[Sequence], list[int], list[Sequence]]:
    """The sequences that choose, their groups, and the sequence that was fed for each."""
    sequences: list[Sequence] = []
    sources: list[Sequence] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        members = group.live if group.opened else opened(group)
        sequences += members
        sources += group.live if group.opened else group.live * len(members)
        group_of += [g] * len(members)
    return sequences, group_of, sources


def opened(group: Group) -> list[Sequence]:
    """The siblings a group opens with: equal but for rank and lineage."""
    (source,) = group.live
    siblings = [source]
    for index in range(1, group.request.strategy.width):
        # A memory that holds a row, which all of them share, is forked by children alone.
        memo = {key: _seen(value) for key, value in source.memo.items()}
        sibling = sprout(source, source.line, fork_lineage(source.lineage, 0, index), memo)
        sibling.index = index
        siblings.append(sibling)
    return siblings


def _seen(value: Any) -> Any:
    return value.copy() if is_memory(value) and not hasattr(value, "release") else value


def _after_drafts(sequences: list[Sequence], drafts: list[np.ndarray]) -> list[Sequence]:
    """(R,) every sequence, followed by itself as it would be after each of its drafts."""
    rows: list[Sequence] = []
    for sequence, draft in zip(sequences, drafts, strict=True):
        rows.append(sequence)
        for more in range(1, len(draft) + 1):
            later = sprout(sequence, sequence.line, sequence.lineage, sequence.memo)
            later.length += more
            rows.append(later)
    return rows


def _accepted(scored: Scored, children: Children) -> Children:
    """One child per sequence: its choices for as long as they equal its drafts, and one more."""
    tokens, counts = children.tokens[:, 0].tolist(), children.counts
    last, taken = [], np.zeros(len(scored.sequences), dtype=np.int64)
    table = np.zeros((len(taken), 1 + max(map(len, scored.drafts))), dtype=np.int64)
    for s, draft in enumerate(scored.drafts):
        first = row = int(scored.first[s])
        for guess in draft.tolist():
            if children.finish[row] is not None or tokens[row] != guess:
                break
            row += 1
        last.append(row)
        taken[s] = counts[first : row + 1].sum()
        table[s, : row + 1 - first] = tokens[first : row + 1]
    return Children(
        np.arange(len(taken)),
        table,
        taken,
        children.score[last],
        [children.finish[row] for row in last],
        memo=None if children.memo is None else [children.memo[row] for row in last],
        lingers=children.lingers,
    )


def _source_rows(
    sources: list[Sequence], fed: Fed, first: np.ndarray, owner: np.ndarray
) -> list[np.ndarray]:
    """For the sequences, then for the first companion of each and so on, the row of logits that
    every row of scores is read from."""
    found = []
    for units in _units(sources):
        start = np.array([fed.first_row[id(unit)] for unit in units], dtype=np.int64)
        found.append((start - first)[owner] + np.arange(len(owner)))
    return found


def _units(sources: list[Sequence]) -> list[list[Sequence] | list[Companion]]:
    companions = range(len(sources[0].companions))
    return [sources, *([source.companions[k] for source in sources] for k in companions)]


def _take(logits: Tensor, rows: np.ndarray) -> Tensor:
    """(R, V) float32 rows; without a copy where they are a block of all logits."""
    first = int(rows[0])
    if np.array_equal(rows, np.arange(first, first + len(rows))):
        chosen = logits[first : first + len(rows)]
    else:
        chosen = logits[torch.from_numpy(rows).to(logits.device)]
    return chosen.to(torch.float32)


def _totals(output: StepOutput, rows: np.ndarray) -> Tensor | None:
    """(R,) totals of the given rows of logits, where the executor reported them."""
    return None if output.totals is None else output.totals[torch.from_numpy(rows)]


def _stops(
    sequences: list[Sequence], table: TokenTable, shown: History | None, reached: np.ndarray
) -> Check:
    def stops(parents: np.ndarray, tokens: np.ndarray) -> list[FinishReason | None]:
        chosen = [sequences[p] for p in parents.tolist()]
        counts = np.ones(len(chosen), dtype=np.int64)
        steps = None if shown is None else reached[parents]
        return check(Candidates(table, chosen, tokens[:, None], counts, shown, steps))

    return stops
