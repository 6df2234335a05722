"""Scores in their one form: every token of a row, or a few tokens and what the others add up to.

An executor may report only the best of a row, and processors may leave few tokens of a wide one;
whatever comes after works on the list, and reads whole rows where the list does not decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Scores of R rows over a vocabulary of V tokens, whole or as lists.

    `values`: (R, n). `tokens`: (R, n) ids, or None where the values are those of all V tokens in
    order; a place with -inf lists nothing. Executors list the best first, of equals the lowest id
    first; processors list ids in rising order. `rest`: (R, 1) a bound that no unlisted token
    exceeds, or None where all of those are -inf; then `read` gives whole rows, (n, V) for (n,) row
    numbers. `totals`: (R,) logarithms of the sums of exponentials of whole rows, where known.
    """

    values: Tensor
    tokens: Tensor | None
    vocabulary: int
    rest: Tensor | None = None
    totals: Tensor | None = None
    read: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def of(cls, values: Tensor, totals: Tensor | None = None) -> Scores:
        """Make scores of whole rows, (R, V)."""
        return cls(values, None, values.shape[-1], totals=totals)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def listed(self) -> bool:
        """True if these are lists of all tokens above -inf."""
        return self.tokens is not None and self.rest is None

    def whole(self) -> Scores:
        """Return the same rows with all tokens: written out, or read where the list came from."""
        if self.tokens is None:
            return self
        if self.rest is not None and self.read is not None:
            return Scores.of(self.read(torch.arange(len(self))), self.totals)
        full = self.values.new_full((len(self), self.vocabulary), -math.inf)
        row, place = torch.nonzero(self.values != -math.inf, as_tuple=True)
        full[row, self.tokens[row, place]] = self.values[row, place]
        return Scores.of(full, self.totals)

    def select(self, rows: Tensor, most: int | None = None) -> Scores:
        """Return the given rows, (n,), in their order; of lists, best first, the `most` best."""
        if self.tokens is None:
            return Scores.of(self.values[rows], _at(self.totals, rows))
        read, rest = self.read, _at(self.rest, rows)
        if rest is not None and most is not None and most < self.values.shape[1]:
            rest = torch.maximum(rest, self.values[rows, most : most + 1])
        return Scores(
            self.values[rows, :most],
            self.tokens[rows, :most],
            self.vocabulary,
            rest,
            _at(self.totals, rows),
            None if read is None else lambda some: read(rows[some]),
        )

    def put(self, rows: Tensor, part: Scores) -> Scores:
        """Return the same lists but for the given rows, (n,), which are the lists of `part`."""
        width = max(self.values.shape[1], part.values.shape[1])
        values = self.values.new_full((len(self), width), -math.inf)
        tokens = torch.zeros((len(self), width), dtype=torch.int64)
        rest = self.values.new_full((len(self), 1), -math.inf)
        for at, one in ((slice(None), self), (rows, part)):
            held = one.values.shape[1]
            values[at] = -math.inf
            values[at, :held], tokens[at, :held] = one.values, one.tokens  # type: ignore[assignment]
            rest[at] = -math.inf if one.rest is None else one.rest
        if bool((rest == -math.inf).all()):
            return Scores(values, tokens, self.vocabulary)
        place = torch.full((len(self),), -1)
        place[rows] = torch.arange(len(rows))

        def read(some: Tensor) -> Tensor:
            found, theirs = values.new_empty(len(some), self.vocabulary), place[some] >= 0
            found[theirs] = part.select(place[some[theirs]]).whole().values
            found[~theirs] = self.select(some[~theirs]).whole().values
            return found

        return Scores(values, tokens, self.vocabulary, rest, read=read)

    def changed(self, change: Callable[[Tensor, Any], Tensor]) -> Scores:
        """Return scores with new values, also for the tokens that are not listed.

        `change(values, rows)`: (n, m) values of the given rows -> new ones, each of its old value
        and row alone, none below another that was below it.
        """
        every, read = slice(None), self.read
        return replace(
            self,
            values=change(self.values, every),
            rest=None if self.rest is None else change(self.rest, every),
            totals=None,
            read=None if read is None else lambda some: change(read(some), some),
        )

    def log_probs(self) -> Scores:
        """Turn logits into log-probabilities.

        Where totals are known they are subtracted, from lists as from whole rows, so that both are
        the same bits.
        """
        totals = self.totals
        if totals is None:
            return Scores.of(torch.log_softmax(self.whole().values, dim=-1))
        return self.changed(lambda values, rows: values - totals[rows, None])

    def rising(self) -> Scores:
        """Return lists with their ids in rising order; whole rows as they are."""
        if self.tokens is None:
            return self
        tokens, order = self.tokens.sort(dim=1, stable=True)
        return replace(self, values=self.values.gather(1, order), tokens=tokens)


def _at(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows]
