"""Diverse beam search: groups of beams that choose in turn, each away from what earlier ones chose.

Source: Vijayakumar et al. 2016. The penalty itself is a processor,
`HammingDiversityLogitsProcessor`, which sees what was chosen in earlier rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from everystep.strategies.base import Batch, strategy
from everystep.strategies.classic import BankedBeams
from everystep.strategies.single import Picked


@strategy("diverse_beam")
@dataclass(frozen=True)
class DiverseBeam(BankedBeams):
    """`groups` searches over equal shares of the beams, one after another in every step."""

    groups: int = 2

    @property
    def rounds(self) -> int:
        """One search after another."""
        return self.groups

    def turn(self, batch: Batch, earlier: Picked) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the rows of the next search, and the tokens that the earlier ones go on with."""
        rows = self.rows(batch, len(earlier))
        if not earlier:
            return rows, None
        chosen: list[list[int]] = [[] for _ in batch.groups]
        for search in range(len(earlier)):
            ranked = self.candidates(batch, earlier, search)
            for g, group in enumerate(batch.groups):
                closed = self.banks(group)[search].closed
                on = self.at_rest(batch, g, search) if closed else self.going(batch, ranked[g], ())
                chosen[g] += [one.token for one in on]
        return rows, np.repeat(np.array(chosen), self.beams, axis=0)
