"""Speculation by matching: drafts are verified with the choices that the base would make anyway.

Source: Leviathan et al. 2023 (the greedy case); with draws keyed by position the base's own draw is
the verdict, so that sampling with drafts gives the very tokens of sampling without.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from everystep.strategies.base import Batch, Drafts, Reads
from everystep.strategies.single import Greedy, Sample, continue_each
from everystep.types import Children, Finished, Group, Scores, Sequence, TokenTable

_NONE = np.empty(0, dtype=np.int64)


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def draft(self, ids: np.ndarray, room: int) -> np.ndarray:
        """Visible ids of one sequence -> at most `room` guessed next ids."""
        ...


@dataclass(frozen=True)
class PromptLookup:
    """What followed the latest n-gram where it first stood before.

    Tries n-grams of `max_ngram` ids down to one; drafts at most `tokens` ids, none at or after an
    id of `stop_ids`. Source: Saxena 2023; the reference's PromptLookupCandidateGenerator.
    """

    tokens: int = 10
    max_ngram: int = 2
    stop_ids: tuple[int, ...] = ()

    def draft(self, ids: np.ndarray, room: int) -> np.ndarray:
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            starts = _occurrences(ids, size)
            if len(starts):
                first = int(starts[0]) + size
                return self._cut(ids[first : first + min(self.tokens, room)])
        return _NONE

    def _cut(self, guess: np.ndarray) -> np.ndarray:
        ends = np.flatnonzero(np.isin(guess, self.stop_ids)) if self.stop_ids else _NONE
        return (guess[: ends[0]] if len(ends) else guess).copy()


def _occurrences(ids: np.ndarray, size: int) -> np.ndarray:
    """Where the last `size` ids stood before, other than at the end; ascending starts."""
    last = len(ids) - size
    match = ids[:last] == ids[last]
    for k in range(1, size):
        match = match & (ids[k : last + k] == ids[last + k])
    return np.flatnonzero(match)


@dataclass(frozen=True)
class Speculative:
    """The base's sequences, in fewer steps: accepts drafts while the base would choose them."""

    drafter: Drafter
    base: Greedy | Sample
    streams: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"truncate"})

    @property
    def width(self) -> int:
        return self.base.width

    @property
    def returns(self) -> int:
        return self.base.returns

    @property
    def kept_rows(self) -> int:
        return self.base.kept_rows

    @property
    def reads(self) -> Reads:
        return self.base.reads

    @property
    def kind(self) -> Hashable:
        return ("speculative", self.base.kind)

    def opening_score(self, index: int) -> float:
        return self.base.opening_score(index)

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return [self._draft(sequence, table) for sequence in sequences]

    def _draft(self, sequence: Sequence, table: TokenTable) -> np.ndarray:
        room = sequence.request.max_length - sequence.length - 1
        if sequence.finish is not None or room <= 0:
            return _NONE
        drafter: Drafter = sequence.request.strategy.drafter
        return drafter.draft(table.data[sequence.line, : sequence.visible], room)

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        return self.base.pick(batch, scores)

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """A draft stands while it equals the choice before it; then follows one choice more."""
        widest = int(batch.row_count.max())
        tokens = np.zeros((len(batch), widest), dtype=np.int64)
        counts = np.ones(len(batch), dtype=np.int64)
        for s, draft in enumerate(batch.drafts):
            first, rows = batch.first_row[s], batch.row_count[s]
            chosen = picked[0][first : first + rows]
            wrong = np.flatnonzero(chosen[:-1] != draft)
            counts[s] = (wrong[0] if len(wrong) else len(draft)) + 1
            tokens[s, :rows] = chosen
        return continue_each(batch, tokens, counts)

    def keep(self, group: Group) -> list[Finished]:
        return self.base.keep(group)

    def finish(self, group: Group) -> list[Finished]:
        return self.base.finish(group)
