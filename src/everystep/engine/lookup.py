"""Drafts that are copied: from the ids of the sequence itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everystep.engine.feed import NO_IDS
from everystep.types import Draft, Sequence, TokenTable
from everystep.types.protocols import Schedule


@dataclass(frozen=True)
class PromptLookup:
    """What followed the latest n-gram where it first stood before.

    Tries n-grams of `max_ngram` ids down to one; drafts `tokens` ids where there are so many, none
    at or after an id of `stop_ids`. Source: Saxena 2023; the reference's
    PromptLookupCandidateGenerator.
    """

    tokens: int = 10
    max_ngram: int = 2
    stop_ids: tuple[int, ...] = ()
    schedule: Schedule = "constant"

    def start(self, vocabulary: int) -> PromptLookup:
        return self

    def propose(
        self, sequences: list[Sequence], table: TokenTable, limits: list[int]
    ) -> list[Draft]:
        each = zip(sequences, limits, strict=True)
        return [Draft(self.draft(table.data[s.line, : s.visible], most)) for s, most in each]

    def draft(self, ids: np.ndarray, most: int) -> np.ndarray:
        """Visible ids of one sequence -> at most so many guessed next ids."""
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            starts = _occurrences(ids, size)
            if len(starts):
                first = int(starts[0]) + size
                guess = ids[first : first + most].copy()
                ends = np.flatnonzero(np.isin(guess, self.stop_ids))
                return guess[: ends[0]] if len(ends) else guess
        return NO_IDS

    def restart(self) -> None:
        """There is nothing to drop."""

    def held(self) -> int:
        return 0


def _occurrences(ids: np.ndarray, size: int) -> np.ndarray:
    """Where the last `size` ids stood before, other than at the end; ascending starts."""
    last = len(ids) - size
    match = ids[:last] == ids[last]
    for k in range(1, size):
        match = match & (ids[k : last + k] == ids[last + k])
    return np.flatnonzero(match)
