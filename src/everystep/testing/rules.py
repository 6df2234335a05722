"""Simple processors for random mixes: small enough to be right at a glance.

They exercise what the engine promises to processors: the pad prefix is visible, drafts are part of
the prefix that follows them, and what a processor remembers is forked and rewound with its
sequence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.types import Rows


@dataclass(frozen=True)
class Discourage:
    """Ids that the prefix holds, pad prefix included, lose `amount` once."""

    amount: float

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids, result = rows.ids(), scores.clone()
        for r, length in enumerate(rows.lengths.tolist()):
            result[r, torch.unique(ids[r, :length])] -= self.amount
        return result


@dataclass(frozen=True)
class Forbid:
    """One id cannot follow a prefix whose length is a multiple of `every`."""

    token: int
    every: int

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        result = scores.clone()
        result[torch.from_numpy(rows.lengths % self.every == 0), self.token] = -torch.inf
        return result


@dataclass(slots=True)
class Tally:
    """The ids of a prefix; it grows with the prefix, and shrinks when that is taken back."""

    ids: list[int]

    def copy(self) -> Tally:
        return Tally(list(self.ids))

    def rewind(self, length: int) -> None:
        """As it was after `length` visible ids."""
        del self.ids[length:]


@dataclass(frozen=True)
class FrequencyPenalty:
    """Ids lose `amount` per occurrence; read once and remembered in `sequence.memo`."""

    amount: float

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids, result = rows.ids(), scores.clone()
        for r, sequence in enumerate(rows.sequences):
            tally = sequence.memo.setdefault("tally", Tally([]))
            tally.ids += ids[r, len(tally.ids) : int(rows.lengths[r])].tolist()
            for token, count in Counter(tally.ids).items():
                result[r, token] -= self.amount * count
        return result
