"""The places at which random choices stand, and the protocol of what draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from everystep.types.scores import Scores


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The places of R choices: `seed`, `lineage` and `position` (R,) uint64.

    `slot`: (R,), their places among the `slots` rows of the call's full rectangle, finished rows
    included.
    """

    seed: np.ndarray
    lineage: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    slots: int


class Draws(Protocol):
    """Chooses tokens at random for rows that stand at given places."""

    @property
    def seed(self) -> int:
        """The value of `Places.seed` for the rows of a request with these draws."""

    @property
    def whole_rows(self) -> bool:
        """True if a choice also looks at tokens without a score."""

    def choose(self, scores: Scores, places: Places) -> Tensor:
        """Choose (R,) one token per row of R, drawn from their softmax; -1 where that is nan.

        Lists, with their ids in rising order, give the same as the rows that they stand for.
        """

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        """Choose (R, count) distinct indices per row of (R, n) probabilities, in order of the draw.

        They are -1 where a row holds nan.
        """

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        """Return (R, n) numbers in (0, 1) from a named stream."""

    def beside(self, stream: str) -> Draws:
        """Return draws of the same kind and seed whose choices depend on none of these."""
