"""The stops that need no text: an end token, a length, a moment, the caller's own function.

`moment` is the only place of the library where a decision reads a clock: `MaxTime` asks it after a
choice, and an engine once before a step whose requests have deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, shown
from everystep.types import FinishReason
from everystep.types.request import Candidates


def moment() -> float:
    """Read the monotonic clock, in seconds."""
    return time.monotonic()


@dataclass(frozen=True)
class EosToken:
    """Ends with any of the given ids."""

    ids: tuple[int, ...]

    def __call__(self, candidates: Candidates) -> np.ndarray:
        return np.array([token in self.ids for token in candidates.last.tolist()], dtype=bool)

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("stop", int(candidates.last[index]))


@dataclass(frozen=True)
class MaxLength:
    """Ends with `limit` visible ids, pad prefix included."""

    limit: int | np.ndarray

    @classmethod
    def stack(cls, stops: Sequence[MaxLength]) -> MaxLength:
        """Return one stop for C candidates, each with the limit of its own."""
        return cls(np.array([stop.limit for stop in stops]))

    def __call__(self, candidates: Candidates) -> np.ndarray:
        return np.asarray(candidates.lengths >= self.limit)

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("length")


@dataclass(frozen=True)
class MaxTime:
    """Ends after `deadline`, a moment of the monotonic clock."""

    deadline: float | np.ndarray

    @classmethod
    def after(cls, seconds: float) -> MaxTime:
        """Return the stop for a request that is made now."""
        return cls(moment() + seconds)

    @staticmethod
    def now() -> float:
        """Return the time by the wall clock, in seconds since the epoch."""
        return time.time()

    @classmethod
    def stack(cls, stops: Sequence[MaxTime]) -> MaxTime:
        """Return one stop for C candidates, each with the deadline of its own."""
        return cls(np.array([stop.deadline for stop in stops]))

    def __call__(self, candidates: Candidates) -> np.ndarray:
        late = moment() > self.deadline
        return np.broadcast_to(late, (len(candidates),))

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("time")


@dataclass(frozen=True, eq=False)
class UserStop:
    """Ends where a function of (input_ids, scores) says so.

    Candidates of equal length are given as one rectangle, others one by one without padding. Scores
    are those of every step, (R, V) each, or None where the call does not return them. It returns
    one bool per row, or one for all. Two are equal if they call the same object.
    """

    call: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UserStop) and self.call is other.call

    def __hash__(self) -> int:
        return id(self.call)

    def __call__(self, candidates: Candidates) -> np.ndarray:
        ids = [candidates.ids(c) for c in range(len(candidates))]
        if len({len(row) for row in ids}) == 1:
            return self._ask(np.stack(ids), candidates.scores(0))
        scores = map(candidates.scores, range(len(ids)))
        return np.concatenate([self._ask(row[None], s) for row, s in zip(ids, scores, strict=True)])

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        return FinishReason("criteria", self.call)

    def _ask(self, ids: np.ndarray, scores: tuple[Tensor, ...] | None) -> np.ndarray:
        answer = self.call(torch.from_numpy(ids), scores)
        try:
            ends = answer.cpu().numpy() if isinstance(answer, Tensor) else np.asarray(answer)
        except (TypeError, ValueError, RuntimeError):
            ends = np.empty(0)
        if ends.shape not in ((), (len(ids),), (len(ids), 1)) or ends.dtype != np.bool_:
            raise RequestError(
                f"stopping criterion {shown(self.call)} returned something else",
                wanted=f"{len(ids)} bools or one",
                got=shown(answer),
                do="Let it return a bool tensor with one value per row",
            )
        return np.broadcast_to(ends.reshape(-1), (len(ids),))
