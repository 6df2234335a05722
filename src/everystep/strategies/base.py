"""What a strategy is: a frozen value that reads scores and returns children.

A strategy runs no loop, calls no model and touches no cache. Selection is in two halves, so that
one transfer from the device serves all kinds of strategies in a step: `pick` reduces the scores
on the device, `select` turns what arrived on the host into children. Both see all groups of one
kind at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from everystep.draws import Draws, Places
from everystep.types import Children, Finished, FinishReason, Group, Sequence, TokenTable

Drafts = list[np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All sequences of one kind that choose in this step, group by group.

    `group_of`: (S,) index into `groups`. `sibling`: (S,) rank among the group's sequences; a group
    that opens stands here `width` times with the same source sequence. `first_row`, `row_count`:
    (S,) the rows of scores of each sequence: 1 + len(drafts[s]), the first after its real tokens,
    the following ones after each draft. `slots`: how many rows the call's full rectangle has;
    `slot`: (S,) the place of each sequence in it. `columns(s)`: (positions, E) hidden states.
    `stops(parents, tokens)` and `visible` (S,) see lengths with the pad prefix.
    """

    groups: list[Group]
    sequences: list[Sequence]
    group_of: np.ndarray
    sibling: np.ndarray
    first_row: np.ndarray
    row_count: np.ndarray
    drafts: Drafts
    table: TokenTable
    slot: np.ndarray
    slots: int
    draws: Draws
    columns: Callable[[int], Tensor]
    stops: Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, list[FinishReason | None]]]
    memo: dict[str, object] = field(default_factory=dict)

    @property
    def opening(self) -> np.ndarray:
        """(G,) whether each group makes its first choice."""
        return np.array([not group.opened for group in self.groups])

    def places(self, sequences: np.ndarray, offset: np.ndarray | int = 0) -> Places:
        """Where the choices of the given sequences stand, `offset` tokens further on."""
        chosen = [self.sequences[i] for i in sequences]
        lineage = np.array([s.lineage for s in chosen], dtype=np.uint64)
        position = np.array([s.generated for s in chosen], dtype=np.int64) + offset
        return Places(lineage, position, self.slot[sequences], self.slots)


class Strategy(Protocol):
    """Frozen; two strategies of equal `kind` select together."""

    width: int
    """Sequences per request from the first choice on."""
    streams: bool
    """Whether chosen tokens may be shown before the group is done."""
    scores: Literal["logits", "log_probs"]
    needs: frozenset[str]
    """Abilities asked of the executor, e.g. "truncate", "columns"."""

    @property
    def kind(self) -> Hashable:
        """What makes strategies select in one call."""
        ...

    def opening_score(self, index: int) -> float:
        """The score that sibling `index` starts with."""
        ...

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        """Per sequence the ids to verify in this step beside the real ones; None: never any."""
        ...

    def pick(self, batch: Batch, scores: Tensor) -> tuple[Tensor, ...]:
        """(R, V) scores -> small tensors, all that `select` will get of them."""
        ...

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """Who continues whom."""
        ...

    def keep(self, group: Group) -> list[Finished]:
        """Those of the group's done sequences that can still be part of its result."""
        ...

    def finish(self, group: Group) -> list[Finished]:
        """The group's result, best first where there is an order."""
        ...
