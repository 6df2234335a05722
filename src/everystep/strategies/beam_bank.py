"""What beams are chosen from, and the bank of hypotheses that have ended."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from everystep.strategies.beams import NEVER
from everystep.types import FinishReason
from everystep.types.stored import stored

if TYPE_CHECKING:
    from everystep.strategies.beam import Beam


class RankedBeams(NamedTuple):
    """What N searches chose from: (N, ranked) `scores`, `parent` (in the batch), `token`, `ended`;
    `reasons`, flat; (N, W) scores and ranks of those that go on; (N,) whether all were drawn.
    """

    scores: np.ndarray
    parent: np.ndarray
    token: np.ndarray
    ended: np.ndarray
    reasons: list[FinishReason | None]
    going: np.ndarray
    ranks: np.ndarray
    drawn: np.ndarray


@stored("bank")
@dataclass(frozen=True, eq=False)
class BeamBank:
    """The best finished scores of N searches, (N, W) float32, which of them are taken, and the
    numbers of their hypotheses; (N, 1) whether more can come."""

    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: np.ndarray

    @classmethod
    def empty(cls, width: int) -> BeamBank:
        """Before anything has ended."""
        places = (1, width)
        return cls(
            np.full(places, NEVER, np.float32),
            np.zeros(places, bool),
            np.full(places, -1),
            np.ones((1, 1), bool),
        )

    @classmethod
    def joined(cls, banks: list[BeamBank]) -> BeamBank:
        """The banks of several requests as one."""
        return cls(*map(np.concatenate, zip(*(bank._arrays for bank in banks), strict=True)))

    def of_requests(self) -> list[BeamBank]:
        """The bank of each request."""
        firsts = range(len(self.scores))
        return [BeamBank(*(one[n : n + 1] for one in self._arrays)) for n in firsts]

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.scores, self.filled, self.serials, self.open

    def _takes(self, beam: Beam) -> np.ndarray:
        """(N, 1) whether more can come: with `early_stopping=True` only until all places are
        taken."""
        if beam.early_stopping is not True:
            return self.open
        return self.open & ~np.logical_and.reduce(self.filled, axis=1, keepdims=True)

    def enter(
        self, final: np.ndarray, ended: np.ndarray, lengths: list[int], beam: Beam
    ) -> tuple[BeamBank, np.ndarray, np.ndarray, np.ndarray]:
        """(N, ranked) candidates of N lengths, and which ended -> the bank with those that it
        takes, and of these, or of all where they are gathered, the search, rank and number."""
        width, place = self.scores.shape[1], np.arange(beam.ranked)
        complete = ended & (place < beam.width)
        just = complete & self._takes(beam)
        moved = self._moved(final, just, beam)
        if not moved.any() and not (beam.gathers and complete.any()):
            none = np.empty(0, np.int64)
            return self, none, none, none
        groups = np.arange(len(final))[:, None]
        # No two candidates of a request get the same number: every step has another length.
        serials = np.array(lengths)[:, None] * beam.ranked + place
        merged = np.concatenate([self.scores, np.where(just, final, final + NEVER)], axis=1)
        best_scores, best = top(merged, width)
        filled = np.concatenate([self.filled, just], axis=1)[groups, best]
        numbered = np.concatenate([self.serials, serials], axis=1)[groups, best]
        taken = np.zeros(merged.shape, dtype=bool)
        taken[groups, best] = True
        search, rank = (complete if beam.gathers else taken[:, width:] & just).nonzero()
        after = replace(
            self,
            scores=np.where(moved, best_scores, self.scores),
            filled=np.where(moved, filled, self.filled),
            serials=np.where(moved, numbered, self.serials),
        )
        return after, search, rank, serials[search, rank]

    def _moved(self, final: np.ndarray, just: np.ndarray, beam: Beam) -> np.ndarray:
        """(N, 1) which banks change when all candidates are ranked with what the banks hold.

        A candidate that did not end ranks far below. It takes an empty place where its score is
        above 0, and may reorder equals, so that later ties are broken differently.
        """
        equal = (self.scores[:, 1:] == self.scores[:, :-1]) & self.filled[:, 1:]
        moved: np.ndarray = just.any(axis=1) | (final > 0).any(axis=1) | equal.any(axis=1)
        return moved[:, None] & self._takes(beam)

    def settle(
        self, best: np.ndarray, ended: np.ndarray, beam: Beam
    ) -> tuple[BeamBank, np.ndarray]:
        """(N, 1) best final scores still possible -> (N,) whether no later hypothesis can change
        the result, which closes the bank.

        Source: transformers' `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = np.where(self.filled, self.scores.min(axis=1, keepdims=True), NEVER)
        going = self._takes(beam) & (best > worst).any(axis=1, keepdims=True)
        over: np.ndarray = ~going | ended.all(axis=1, keepdims=True)
        same = np.array_equal(over, ~self.open)
        return self if same else replace(self, open=~over), over[:, 0]


def divisors(values: list[float]) -> np.ndarray:
    """(N, 1) float32."""
    return np.array(values, dtype=np.float32)[:, None]


def top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(G, n) -> (G, count) the best and their places; of equals those that torch would take."""
    order = (-scores).argsort(axis=1, kind="stable")
    ranked = scores[np.arange(len(scores))[:, None], order]
    if not (ranked[:, 1:] < ranked[:, :-1]).all():
        best = torch.topk(torch.from_numpy(scores), count)
        return best.values.numpy(), best.indices.numpy()
    return ranked[:, :count], order[:, :count]
