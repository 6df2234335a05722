"""The base of processors that take tokens out, in whole rows or in shortlists of them."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from everystep.processors.base import LogitsProcessor
from everystep.processors.best import Blocks, is_wide
from everystep.types import Rows, Shortlist


def without(short: Shortlist, removed: Tensor) -> Shortlist:
    """The list with -inf where `removed`, (R, n) bool, says so."""
    return replace(short, scores=short.scores.masked_fill(removed, -math.inf))


class Filter(LogitsProcessor):
    """Base of the processors that put `filter_value` where `removed` says so.

    They look at scores and not at ids, so that a shortlist is a row like any other to them.
    """

    filter_value: float

    @property
    def narrows(self) -> bool:
        """Whether what it removes leaves the list."""
        return self.filter_value == -math.inf

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) scores -> (R, V) bool."""
        raise NotImplementedError

    def removed_of_many(self, scores: Tensor) -> Tensor:
        """As `removed`, in a wide row or a shortlist of one: both must give the same."""
        return self.removed(scores)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        short = self.shorten(rows, scores)
        return self.overwrite(rows, scores.clone()) if short is None else short.dense()

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        removed = self.removed_of_many if is_wide(scores) else self.removed
        return scores.masked_fill_(removed(scores), self.filter_value)

    def narrow(self, rows: Rows, short: Shortlist) -> Shortlist | None:
        """The same tokens, of which some have no score any more."""
        if not self.narrows:
            return None
        return without(short, self.removed_of_many(short.scores))

    def _blocks(
        self, scores: Tensor, temperature: float | tuple[float, ...] = 1.0
    ) -> Blocks | None:
        """The scores by blocks, where looking for few of them is possible and allowed."""
        if not self.narrows or not is_wide(scores):
            return None
        return Blocks.of(scores, temperature)
