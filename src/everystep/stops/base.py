"""What a stop is: a frozen value that says which of many candidate sequences end now."""

from __future__ import annotations

from collections.abc import Sequence as Steps
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from everystep.types import FinishReason, Prompt, Request, Sequence, TokenTable


@dataclass(frozen=True, eq=False)
class Candidates:
    """C sequences as they would be after a choice.

    Candidate c is the visible ids of `parents[c]`, less its provisional ones, followed by `new[c]`
    ((C, n), the first `counts[c]` >= 1 of them count). `steps`: scores (R, V) that the call chose
    from in every step so far, then in this one, a drafted token being a step; None if nobody asked.
    `settled`: how many of them are of earlier steps.
    """

    table: TokenTable
    parents: list[Sequence]
    new: np.ndarray
    counts: np.ndarray
    steps: Steps[Tensor] | None = None
    settled: int = 0

    @classmethod
    def of_rows(cls, ids: np.ndarray) -> Candidates:
        """The rows of a rectangle (C, T) of visible ids, as if each had just got its last one."""
        table = TokenTable(*ids.shape)
        heads = [row[:-1] for row in ids]
        requests = [Request("", Prompt(ids=head), strategy=None, draws=None) for head in heads]
        parents = [
            Sequence(request, table.open(head), len(head))
            for request, head in zip(requests, heads, strict=True)
        ]
        newest = ids[:, -1:]
        return cls(table, parents, newest, np.full(len(ids), newest.shape[1]))

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(C,) visible ids of each candidate, pad prefix and new tokens included."""
        settled = [parent.visible - parent.provisional for parent in self.parents]
        return np.array(settled, np.int64) + self.counts

    @cached_property
    def last(self) -> np.ndarray:
        """(C,) the newest id of each candidate."""
        if self.new.shape[1] == 1:
            return self.new[:, 0]
        return self.new[np.arange(len(self.parents)), self.counts - 1]

    def ids(self, candidate: int) -> np.ndarray:
        """All visible ids of one candidate."""
        parent = self.parents[candidate]
        head = self.table.data[parent.line, : parent.visible - parent.provisional]
        return np.concatenate([head, self.new[candidate, : self.counts[candidate]]])

    def tail(self, candidate: int, count: int) -> list[int]:
        """The last `count` visible ids of one candidate that are no padding before its prompt, or
        all if there are fewer."""
        parent = self.parents[candidate]
        new = self.new[candidate, : self.counts[candidate]]
        end = parent.visible - parent.provisional
        start = max(end + len(new) - count, parent.request.pad_prefix)
        head = self.table.data[parent.line, min(start, end) : end]
        return [*head.tolist(), *new.tolist()][-count:]

    def scores(self, candidate: int) -> tuple[Tensor, ...] | None:
        """Per step up to the last token of a candidate, (R, V); None if nobody asked."""
        if self.steps is None:
            return None
        return tuple(self.steps[: self.settled + int(self.counts[candidate])])

    def select(self, indices: np.ndarray) -> Candidates:
        """The given candidates, in the given order."""
        chosen = [self.parents[i] for i in indices]
        new, counts = self.new[indices], self.counts[indices]
        return replace(self, parents=chosen, new=new, counts=counts)


class Stop(Protocol):
    """A function of candidates; equal stops of different requests are called once."""

    def __call__(self, candidates: Candidates) -> np.ndarray:
        """(C,) bool: which candidates end."""
        ...

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        """Why candidate `index`, for which the call said True, ends."""
        ...
