"""The look at a step of one request, kept for later: logits, scores, and what led to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.engine.batches import mixed, readout_name
from everystep.engine.recording import name_of
from everystep.engine.watching import StepRecord
from everystep.processors.pipeline import apply
from everystep.types import FinishReason, Request, Rows, Scores, Sequence, TokenTable
from everystep.types import values_of as immutable


class ScoreChange(NamedTuple):
    """The scores before and after one processor, (R, V) each."""

    name: str
    before: Tensor
    after: Tensor


@dataclass(frozen=True, slots=True)
class Branch:
    """A hypothesis that came out of a step.

    `parent`: the index of the hypothesis that it continues. `index`: its own. `tokens`: the new
    ones.
    """

    parent: int
    index: int
    tokens: tuple[int, ...]
    score: float
    finish: FinishReason | None


class Sight:
    """The record of a step with copies of what later steps change: the ids of every row."""

    def __init__(self, record: StepRecord) -> None:
        scored, children = record.scored, record.children
        self._scored, self._children, self._captures = scored, children, record.captures
        sequences, first = scored.layout.sequences, scored.layout.first
        self.request: Request = sequences[0].request
        accepted = np.ones(len(sequences), dtype=np.int64)
        np.maximum.at(accepted, children.parent, children.counts)
        owners = [s for s, count in enumerate(accepted) for _ in range(count)]
        self._owner = owners
        self._rows = torch.tensor(
            [first[s] + i for s, count in enumerate(accepted) for i in range(count)]
        )
        self._lengths = np.array(
            [one.visible + i for one, n in zip(sequences, accepted, strict=True)
             for i in range(n)]
        )  # fmt: skip
        lines = np.array([one.line for one in sequences])
        self._ids = scored.batch.table.data[lines, : int(self._lengths.max())].copy()
        self._values = [immutable(one.memo) for one in sequences]

    @property
    def logits(self) -> Tensor:
        """The logits (R, V) of the rows that led to tokens."""
        return self._scored.logits[self._rows]

    @cached_property
    def scores(self) -> Tensor:
        """The scores (R, V) that the strategy chose from."""
        return self._scored.scores.whole().values[self._rows]

    @cached_property
    def changes(self) -> tuple[ScoreChange, ...]:
        """The change by each processor, in order; the readout comes first where it changed
        something."""
        request, found = self.request, []
        given = self._scored.given.select(self._rows)
        beside, early = self._scored.beside, self._scored.early
        early = None if early is None else early[:, self._rows]
        allowed = self._scored.allowed
        allowed = None if allowed is None else allowed[self._rows]
        scores = mixed(request, given, [one[self._rows] for one in beside], early, allowed)
        if scores is not given:
            found.append(ScoreChange(readout_name(request), given.values, scores.values))
        rows, sources = self._prefixes()
        for processor in request.processors:
            for source in sources:
                source.request = replace(request, processors=(processor,))
            after = Scores.of(apply(rows, scores).whole().values)
            found.append(ScoreChange(name_of(processor), scores.values, after.values))
            scores = after
        return tuple(found)

    def _prefixes(self) -> tuple[Rows, list[Sequence]]:
        """Return the rows as processors saw them, and the sequences that they belong to."""
        table, sequences = TokenTable(*self._ids.shape), self._scored.layout.sequences
        sources = []
        for one, ids, values in zip(sequences, self._ids, self._values, strict=True):
            line = table.open(ids)
            source = Sequence(self.request, line, one.length, lineage=one.lineage, memo=values)
            source.index, source.provisional = one.index, one.provisional
            sources.append(source)
        return Rows(table, [sources[s] for s in self._owner], self._lengths), sources

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The hypotheses that came out of the step."""
        children, sequences = self._children, self._scored.layout.sequences
        index = children.index
        return tuple(
            Branch(
                sequences[parent].index,
                sequences[parent].index if index is None else int(index[c]),
                tuple(children.tokens[c, : children.counts[c]].tolist()),
                float(children.score[c]),
                children.finish[c],
            )
            for c, parent in enumerate(children.parent.tolist())
        )

    def number(self) -> float | None:
        """Return the number in (0, 1) that drew the first row's token; None without a draw."""
        if not self.request.strategy.reads.number:
            return None
        places = self._scored.batch.places()
        return float(self.request.draws.uniform("choice", places)[int(self._rows[0]), 0])

    def layers(self, name: str) -> tuple[Tensor, ...] | None:
        """Return hidden states or attentions of the first sequence by layer, if they were asked
        for."""
        held = self._captures.get(0)
        found: tuple[Tensor, ...] | None = None if held is None else getattr(held[1], name)
        return found
