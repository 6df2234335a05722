"""Named throws of a generator of random numbers, out of which random requests are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

EMBED_DIM = 4


@dataclass(frozen=True)
class Dice:
    """Named throws of one generator."""

    rng: np.random.Generator

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def ids(self, vocab_size: int, count: int) -> np.ndarray:
        """(count,) ids; mostly a phrase over and over."""
        ids = self.rng.integers(0, vocab_size, count)
        if count and self.chance(0.7):
            phrase = ids[: self.between(2, 5)]
            ids = np.tile(phrase, -(-count // len(phrase)))[:count]
        return ids.astype(np.int64)
