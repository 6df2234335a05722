"""What a strategy sees of a step: the sequences that choose together, and where they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from everystep.types.columns import Columns
from everystep.types.protocols import Draws

if TYPE_CHECKING:
    from everystep.types import FinishReason, Group, Sequence, TokenTable


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


def places_of(
    sequences: list[Sequence], position: np.ndarray, slot: np.ndarray, slots: int
) -> Places:
    """Return where choices of R sequences stand, each at a position of its row, (R,)."""
    seed = np.array([s.request.draws.seed % 2**64 for s in sequences], dtype=np.uint64)
    lineage = np.array([s.lineage for s in sequences], dtype=np.uint64)
    return Places(seed, lineage, position.astype(np.uint64), slot, slots)


Check = Callable[[np.ndarray, np.ndarray], list["FinishReason | None"]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """S sequences whose groups have equal strategies, one row of scores each, group by group.

    `group_of`: (S,) index into `groups`; a group that opens stands here `width` times with the same
    source. `slot`: (S,) the place of each among the `slots` rows of the call's full rectangle.
    `vocabulary`: V. `columns(s)`: the hidden states of all positions of a sequence, where
    its strategy reads them. `stops(parents, tokens)` says of
    (C,) tokens after (C,) sequences which of them end it, and why.
    """

    groups: list[Group]
    sequences: list[Sequence]
    group_of: np.ndarray
    table: TokenTable
    slot: np.ndarray
    slots: int
    draws: Draws
    vocabulary: int
    columns: Callable[[int], Columns]
    stops: Check

    def __len__(self) -> int:
        return len(self.sequences)

    def places(self) -> Places:
        """Return where the next choices of every sequence stand."""
        position = np.array([s.length for s in self.sequences], dtype=np.uint64)
        return places_of(self.sequences, position, self.slot, self.slots)

    def group_places(self, width: int) -> Places:
        """Return where the choices of whole groups of `width` sequences stand.

        A group stands at the first of its sequences, in the place of the group, whatever the
        lineages.
        """
        first = self.sequences[::width]
        position = np.array([s.length for s in first], dtype=np.uint64)
        at = places_of(first, position, self.slot[::width] // width, self.slots // width)
        return replace(at, lineage=np.zeros(len(first), np.uint64))
