"""Sequences as they would be after a choice, for the stops that look at them."""

from __future__ import annotations

from collections.abc import Sequence as Steps
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from everystep.types import Prompt, Sequence, TokenTable, nobodys


@dataclass(frozen=True, eq=False)
class Candidates:
    """C sequences as they would be after a choice.

    Candidate c is the visible ids of `parents[c]`, less its provisional ones, followed by the id
    `last[c]`. `steps`: scores (R, V) that the call chose from in every step so far, this one
    included; None if they were not asked for. A drafted token is a step of its own, and candidate c
    was chosen from the last of the first `reached[c]`.
    """

    table: TokenTable
    parents: list[Sequence]
    last: np.ndarray
    steps: Steps[Tensor] | None = None
    reached: np.ndarray | None = None

    @classmethod
    def of_rows(cls, ids: np.ndarray) -> Candidates:
        """Make candidates of a rectangle (C, T) of visible ids, each of which just got its last."""
        table = TokenTable(*ids.shape)
        heads = [row[:-1] for row in ids]
        requests = [nobodys(Prompt(ids=head)) for head in heads]
        parents = [
            Sequence(request, table.open(head), len(head))
            for request, head in zip(requests, heads, strict=True)
        ]
        return cls(table, parents, ids[:, -1])

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(C,) visible ids of each candidate, pad prefix and new token included."""
        return np.array([parent.visible - parent.provisional + 1 for parent in self.parents])

    def ids(self, candidate: int) -> np.ndarray:
        """Return all visible ids of one candidate."""
        parent = self.parents[candidate]
        head = self.table.data[parent.line, : parent.visible - parent.provisional]
        return np.append(head, self.last[candidate])

    def tail(self, candidate: int, count: int) -> list[int]:
        """Return the last `count` visible ids of one candidate, or all if there are fewer.

        Padding before its prompt is left out.
        """
        parent = self.parents[candidate]
        end = parent.visible - parent.provisional
        start = max(end + 1 - count, parent.request.pad_prefix)
        head = self.table.data[parent.line, min(start, end) : end]
        return [*head.tolist(), int(self.last[candidate])]

    def scores(self, candidate: int) -> tuple[Tensor, ...] | None:
        """Return (R, V) per step up to a candidate's last token; None if they were not wanted."""
        if self.steps is None or self.reached is None:
            return None
        return tuple(self.steps[: int(self.reached[candidate])])

    def select(self, indices: np.ndarray) -> Candidates:
        chosen = [self.parents[i] for i in indices]
        reached = None if self.reached is None else self.reached[indices]
        return replace(self, parents=chosen, last=self.last[indices], reached=reached)
