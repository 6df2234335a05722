"""Drafts that are copied: from the ids of the sequence itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everystep.engine.feed import NO_IDS
from everystep.types import Draft, Sequence, TokenTable
from everystep.types.protocols import Schedule
from everystep.types.request import WantedDraft


@dataclass(frozen=True)
class PromptLookup:
    """A drafter that copies what followed the latest n-gram where it first stood before.

    Tries n-grams of `max_ngram` ids down to one; drafts `tokens` ids where there are so many, none
    at or after an id of `stop_ids`. `alternatives` are what followed it elsewhere, and what
    followed shorter n-grams. Source: Saxena 2023; transformers'
    PromptLookupCandidateGenerator.
    """

    tokens: int = 10
    max_ngram: int = 2
    stop_ids: tuple[int, ...] = ()
    schedule: Schedule = "constant"
    alternatives: int = 0

    def start(self, vocabulary: int) -> PromptLookup:
        return self

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        return [Draft(self.draft(read(s, table), most, rank)) for s, most, rank in asked]

    def draft(self, ids: np.ndarray, most: int, rank: int = 0) -> np.ndarray:
        """Visible ids of one sequence -> at most so many guessed next ids, by the first place where
        the n-gram stood that `rank` others with other next ids come before."""
        nexts: list[int] = []
        for size in range(min(self.max_ngram, len(ids) - 1), 0, -1):
            for start in _occurrences(ids, size).tolist():
                first = start + size
                if ids[first] in nexts:
                    continue
                if len(nexts) == rank:
                    return before(ids[first : first + most].copy(), self.stop_ids)
                nexts.append(int(ids[first]))
        return NO_IDS

    def restart(self) -> None:
        """There is nothing to drop."""

    def held(self) -> int:
        return 0


def read(sequence: Sequence, table: TokenTable) -> np.ndarray:
    """The visible ids of a sequence."""
    return table.data[sequence.line, : sequence.visible]


def before(guess: np.ndarray, stop_ids: tuple[int, ...]) -> np.ndarray:
    """The guess up to the first of these ids."""
    ends = np.flatnonzero(np.isin(guess, stop_ids))
    return guess[: ends[0]] if len(ends) else guess


def _occurrences(ids: np.ndarray, size: int) -> np.ndarray:
    """Find where the last `size` ids stood before, other than at the end; ascending starts."""
    last = len(ids) - size
    match = ids[:last] == ids[last]
    for k in range(1, size):
        match = match & (ids[k : last + k] == ids[last + k])
    return np.flatnonzero(match)
