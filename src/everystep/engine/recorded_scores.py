"""Scores of a step as its record needs them: on the host, whole or as lists, and summed up.

What every row needs is found for all rows at once; a row is read whole only where a list does not
decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor

from everystep.executors.native.sums import sum_up
from everystep.types import Request, Scores

BEST = 10
"""Candidates of a choice that are recorded before and after every stage, at least."""
_MOST_BEST = 66
_BLOCK = 64


def candidates_of(request: Request) -> int:
    """Return how many of the best of a row are recorded before and after every stage."""
    return min(max(BEST, 2 * request.strategy.width + 2), _MOST_BEST)


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers about scores (V,) as a whole: the logarithm of the sum of their exponentials, the
    entropy of their softmax in nats, how many are possible, and the lowest."""

    total: float
    entropy: float
    possible: int
    least: float

    @classmethod
    def of(cls, scores: np.ndarray) -> Summary:
        """Sum up scores, of which some may be -inf."""
        if not scores.size:
            return cls(-math.inf, 0.0, 0, -math.inf)
        if (sums := sum_up(scores)) is not None and math.isfinite(sums[3]):
            least, most, mass, weighed = sums
            entropy = max(math.log(mass) - weighed / mass, 0.0)
            return cls(most + math.log(mass), entropy, len(scores), least)
        least, most = float(scores.min()), float(scores.max())
        possible = len(scores)
        if not least > -np.inf:
            possible -= int(np.count_nonzero(scores == -np.inf))
            scores = scores[scores != -np.inf]
        if not possible:
            return cls(-math.inf, 0.0, 0, least)
        if not np.isfinite(most):
            return cls(most, math.nan, possible, least)
        below = scores - most
        weights = np.exp(below)
        mass = float(weights.sum(dtype=np.float64 if scores.dtype == np.float64 else None))
        mean = float(np.dot(weights, below)) / mass
        return cls(most + math.log(mass), max(math.log(mass) - mean, 0.0), possible, least)


@dataclass(eq=False)
class HeldScores:
    """Scores (R, V) of rows on the host, as they came: whole, or as lists of n tokens.

    A list with a `rest` names the best of its row; whole rows are read for what it does not say.
    """

    scores: Scores
    _whole: np.ndarray | None = field(default=None, init=False, repr=False)
    _possible: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _summaries: dict[int, Summary] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, scores: Scores) -> HeldScores:
        """Hold scores; those on an accelerator come to the host."""
        if scores.tokens is None:
            return cls(Scores.of(scores.values.detach().float().cpu()))
        return cls(scores)

    def know(self, rows: Tensor) -> None:
        """Note the whole rows (R, V) of lists, where they are at hand."""
        self._whole = rows.float().cpu().numpy()

    def know_possible(self, number: int, count: int) -> None:
        """Note how many tokens are possible in a row."""
        self._possible[number] = count

    @property
    def undecided(self) -> bool:
        """True for lists beside which other tokens are possible."""
        return self.scores.rest is not None

    def row(self, number: int) -> np.ndarray:
        """Return the scores (V,) of a row."""
        if self._whole is None:
            found: np.ndarray = self.scores.whole().values.float().numpy()
            self._whole = found
        row: np.ndarray = self._whole[number]
        return row

    @cached_property
    def _lists(self) -> list[tuple[list[int], list[float]]]:
        """The possible tokens that lists name and their values, best first, of equals the lowest id
        first."""
        values, tokens = self.scores.values.numpy(), self.scores.tokens.numpy()  # type: ignore[union-attr]
        order = np.lexsort((tokens, -values), axis=1)
        ids = np.take_along_axis(tokens, order, 1).tolist()
        own = np.take_along_axis(values, order, 1).astype(np.float64).tolist()
        return [*map(_possible_of, ids, own)]

    @cached_property
    def _rest(self) -> list[float]:
        rest = self.scores.rest
        return [-math.inf] * len(self.scores) if rest is None else rest[:, 0].tolist()

    def best(self, number: int, count: int) -> list[int]:
        """Return the possible ids of the best scores of a row, best first."""
        if self.scores.tokens is not None:
            ids, values = self._lists[number]
            own = ids[:count]
            if not self.undecided or (
                len(own) == count and values[count - 1] >= self._rest[number]
            ):
                return own
        row = self.row(number)
        best = best_of(row, count)
        found: list[int] = best[row[best] != -np.inf].tolist()
        return found

    def values(self, number: int, ids: list[int]) -> list[float]:
        """Return the scores of these ids."""
        if self.scores.tokens is not None:
            named, values = self._lists[number]
            if ids == named[: len(ids)]:
                return values[: len(ids)]
            listed = dict(zip(named, values, strict=True))
            if not self.undecided or all(id in listed for id in ids):
                return [listed.get(id, -math.inf) for id in ids]
        found: list[float] = self.row(number)[ids].tolist()
        return found

    def value(self, number: int, id: int) -> float:
        """Return the score of an id."""
        if self.scores.tokens is not None:
            ids, values = self._lists[number]
            if id in ids:
                return values[ids.index(id)]
            if not self.undecided:
                return -math.inf
        return float(self.row(number)[id])

    def rank(self, number: int, id: int, score: float) -> int:
        """Return how many tokens have a higher score than this one has."""
        if self.scores.tokens is not None:
            ids, values = self._lists[number]
            if id in ids and score == score:
                return values.index(score)  # the first of those that equal it
            if not self.undecided:
                return len(values) if score == -math.inf else sum(one > score for one in values)
        return int(np.count_nonzero(self.row(number) > score))

    def summary(self, number: int) -> Summary:
        """Return the row summed up."""
        if number not in self._summaries:
            if self.scores.tokens is None or self.undecided:
                found = self._summaries[number] = Summary.of(self.row(number))
                self.know_possible(number, found.possible)
            else:
                self._summaries = dict(enumerate(_of_lists(self.scores.values.numpy())))
        return self._summaries[number]

    def possible(self, number: int) -> int:
        """Return how many tokens are possible in a row."""
        if self.scores.tokens is not None and not self.undecided:
            return len(self._lists[number][0])
        if number not in self._possible:
            row = self.row(number)
            self._possible[number] = len(row) - int(np.count_nonzero(row == -np.inf))
        return self._possible[number]

    def removed(self, number: int, before: HeldScores, was: int) -> int:
        """Return how many tokens that were possible before are not possible any more."""
        if self.scores.tokens is not None and not self.undecided:  # a list names what is left
            own = before.values(was, self._lists[number][0])  # of which some may be new
            return before.possible(was) - sum(one != -math.inf for one in own)
        gone = self.row(number) == -np.inf
        if not gone.any():
            return 0
        return int(np.count_nonzero(gone & (before.row(was) != -np.inf)))

    def least(self, number: int) -> float:
        """Return the lowest score of a row; -inf where some are ruled out."""
        return self.summary(number).least

    def part(self, number: int, id: int) -> tuple[float, float]:
        """Return the part of (0, 1) that leads to a token, where shares are in the order of ids."""
        total = self.summary(number).total
        if self.scores.tokens is not None and not self.undecided:
            own = [*zip(*self._lists[number], strict=True)]
            low = math.fsum([math.exp(one - total) for other, one in own if other < id])
            return low, low + math.exp(self.value(number, id) - total)
        shares = np.exp(self.row(number)[: id + 1].astype(np.float64) - total)
        return float(shares[:-1].sum()), float(shares.sum())

    def equals(self, number: int, other: HeldScores, theirs: int) -> bool:
        """Return whether a row has the scores of one of the others, nan to nan."""
        if self is other and number == theirs:
            return True
        if self.scores.tokens is not None and other.scores.tokens is not None:
            alike = self.undecided == other.undecided
            if alike and self._lists[number] == other._lists[theirs]:
                return True
        if self.possible(number) != other.possible(theirs):  # lists need not be whole for that
            return False
        one, two = self.row(number), other.row(theirs)
        return np.array_equal(one, two) or np.array_equal(one, two, equal_nan=True)


def _possible_of(ids: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return the tokens of a list that are possible, and their values."""
    if not values or values[-1] > -math.inf:
        return ids, values
    kept = [i for i, one in enumerate(values) if one != -math.inf]
    return [ids[i] for i in kept], [values[i] for i in kept]


def _of_lists(values: np.ndarray) -> list[Summary]:
    """Sum up lists (R, n), which name all that is possible in their rows."""
    own = values.astype(np.float64)
    most = own.max(axis=1, keepdims=True, initial=-np.inf)
    if not np.isfinite(most).all():
        return [Summary.of(row) for row in own]
    below, named = own - most, own != -np.inf
    weights = np.exp(below)
    mass = weights.sum(axis=1)
    mean = np.where(named, weights * np.where(named, below, 0.0), 0.0).sum(axis=1) / mass
    entropies = np.maximum(np.log(mass) - mean, 0.0).tolist()
    totals, counts = (most[:, 0] + np.log(mass)).tolist(), named.sum(axis=1).tolist()
    found = zip(totals, entropies, counts, strict=True)
    return [Summary(total, entropy, count, -math.inf) for total, entropy, count in found]


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the best scores (V,), best first."""
    columns = len(scores) // _BLOCK
    if columns > count * 2:  # the best are in the columns whose best are the best
        tops = scores[: columns * _BLOCK].reshape(_BLOCK, columns).max(axis=0)
        best = np.argpartition(tops, -count)[-count:]
        near = (np.arange(_BLOCK)[:, None] * columns + best).reshape(-1)
        near = np.concatenate([near, np.arange(columns * _BLOCK, len(scores))])
    else:
        near = np.arange(len(scores))
    order = np.lexsort((near, -scores[near]))
    found: np.ndarray = near[order[:count]]
    return found
