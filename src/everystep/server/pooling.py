"""One vector of a prompt, made of the last hidden states of its positions.

It is asked of the engine like everything else, by a strategy that reads the states and ends where
others would choose, so that prompts of any length and number share its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.strategies.base import Batch, Reads
from everystep.strategies.single import Picked
from everystep.types import Children, Finished, FinishReason, Group, Scores

VECTOR = "vector"
"""The name under which a sequence remembers its vector."""


@dataclass(frozen=True)
class Pooling:
    """The mean of the normalised last hidden states of a prompt, or that of its last position.

    A sequence ends without a token; its memo has the vector, (E,) float32.
    """

    how: Literal["mean", "last"] = "mean"
    width: ClassVar[int] = 1
    returns: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(hidden=True)
    rounds: ClassVar[int] = 1

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Pick (S, E) vectors."""
        return (torch.stack([self._vector(batch.columns(s).pieces) for s in range(len(batch))]),)

    def _vector(self, pieces: Sequence[Tensor]) -> Tensor:
        if self.how == "last":
            return pieces[-1][-1].float()
        total = torch.stack([piece.sum(0, dtype=torch.float64) for piece in pieces]).sum(0)
        return (total / sum(map(len, pieces))).float()

    def select(self, batch: Batch, picked: Picked) -> Children:
        """End every sequence, and let it remember its vector."""
        ((vectors,),) = picked
        count = len(batch)
        return Children(
            np.arange(count),
            np.zeros((count, 1), dtype=np.int64),
            np.zeros(count, dtype=np.int64),
            np.zeros(count),
            [FinishReason("stop")] * count,
            memo=[{VECTOR: np.array(one, dtype="<f4")} for one in vectors],
        )

    def finish(self, group: Group) -> list[Finished]:
        """Return the only sequence."""
        return group.done[:1]


def vector_of(group: Group) -> bytes:
    """Return the vector of a group that has ended, as float32 with the least byte first."""
    found = group.done[0].memo.get(VECTOR)
    if not isinstance(found, np.ndarray):
        raise InvariantError("a prompt ended without its vector")
    return found.tobytes()
