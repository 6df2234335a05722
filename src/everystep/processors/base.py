"""What a processor is: a frozen value, called with rows and their scores, that returns scores.

State that a processor keeps between steps lives in `sequence.memo` under its own key. Instances
of one class from different requests can run as one call when the class has `stack`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from everystep.types import Rows


class Processor(Protocol):
    """A function of (rows, scores); must not change the scores it was given in place."""

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) scores -> (R, V) scores."""
        ...
