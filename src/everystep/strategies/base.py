"""What a strategy is: a frozen value that reads scores and returns children.

A strategy runs no loop, calls no model and touches no cache. Selection is in two halves, so that
one transfer from the device serves all kinds of strategies in a step: `pick` reduces the scores
on the device, `select` turns what arrived on the host into children. Both see all groups of one
kind at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from everystep.draws import Draws, Places, places_of
from everystep.errors import RequestError, message
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence, TokenTable

Drafts = list[np.ndarray]
Check = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, list[FinishReason | None]]]
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """All sequences of one kind that choose in this step, group by group.

    `group_of`: (S,) index into `groups`; a group that opens stands here `width` times with the same
    source sequence. `first_row`, `row_count`: (S,) the rows of scores of each sequence:
    1 + len(drafts[s]), the first after its real tokens, the following ones after each draft.
    `slots`: how many rows the call's full rectangle has, `slots_per_group` for each request of it.
    `vocabulary`: V.
    `columns(s)`: (positions, E) hidden states.
    `stops(parents, tokens (C, n), counts)` says how many tokens of each child stand before it ends
    (the ending one included), and why it ends.
    """

    groups: list[Group]
    sequences: list[Sequence]
    group_of: np.ndarray
    first_row: np.ndarray
    row_count: np.ndarray
    drafts: Drafts
    table: TokenTable
    slots_per_group: int
    slots: int
    draws: Draws
    vocabulary: int
    columns: Callable[[int], Tensor]
    stops: Check

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def row_sequence(self) -> np.ndarray:
        """(R,) whose each row of scores is."""
        return np.arange(len(self.sequences)).repeat(self.row_count)

    @property
    def slot(self) -> np.ndarray:
        """(S,) the place of each sequence in the call's full rectangle."""
        first = [group.rank * self.slots_per_group for group in self.groups]
        pairs = zip(self.group_of.tolist(), self.sequences, strict=True)
        return np.array([first[g] + sequence.index for g, sequence in pairs], dtype=np.int64)

    def places(self, sequences: np.ndarray) -> Places:
        """Where the next choices of the given sequences stand."""
        offset = np.zeros(len(sequences), dtype=np.int64)
        return self._places(sequences, offset, self.slot[sequences], self.slots)

    def row_places(self) -> Places:
        """Where the choice of every row of scores stands, drafted rows included."""
        if len(self.sequences) == int(self.row_count.sum()):
            return self.places(np.arange(len(self.sequences)))
        owner = self.row_sequence
        rows = np.arange(len(owner))
        return self._places(owner, rows - self.first_row[owner], rows, len(rows))

    def _places(
        self, sequences: np.ndarray, offset: np.ndarray, slot: np.ndarray, slots: int
    ) -> Places:
        chosen = [self.sequences[i] for i in sequences.tolist()]
        position = np.array([s.generated for s in chosen], dtype=np.int64) + offset
        return places_of(chosen, position, slot, slots)


def require_drawn(chosen: np.ndarray) -> None:
    """RequestError where a row had nothing to draw from, which draws answer with -1."""
    if chosen.size and chosen.min() < 0:
        raise RequestError(
            message(
                "no token can be drawn: the scores of a sequence hold nan, or nothing but -inf",
                wanted="at least one finite score, and neither nan nor +inf",
                do="Relax the processors, or set remove_invalid_values=True",
            )
        )


@dataclass(frozen=True, slots=True)
class Reads:
    """What a strategy reads of a row.

    `scores`: processed logits, or processed log-probabilities. `best`: how many of the best scores
    decide where no processor changes them, or 0 for all of them. `shortlists`: whether `pick` needs
    no token that processors left at -inf; then they may be shown the best of a row alone.
    """

    scores: Literal["logits", "log_probs"] = "logits"
    best: int = 0
    shortlists: bool = False


class Strategy(Protocol):
    """Frozen; two strategies of equal `kind` select together."""

    width: int
    """Sequences per request from the first choice on."""
    returns: int
    """Sequences in a request's result; while it streams, those of rank < returns."""
    kept_rows: int
    """Rows per request in the scores and layers of a step that callers get: all `width` sequences,
    or, where that is less, those that a token was chosen from."""
    streams: bool
    """Whether chosen tokens may be shown at once; if not, those that all `rivals` share are."""
    needs: frozenset[str]
    """Abilities asked of the executor, e.g. "truncate", "columns"."""

    @property
    def reads(self) -> Reads:
        """What `pick` reads of a row."""
        ...

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

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        """The scores of R rows -> small tensors, all that `select` will get of them.

        Where lists do not decide, it reads whole rows.
        """
        ...

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """Who continues whom."""
        ...

    def keep(self, group: Group) -> list[Finished]:
        """Those of the group's done sequences that can still be part of its result."""
        ...

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """The hypotheses that the group's result can still come from; of no use if `streams`."""
        ...

    def finish(self, group: Group) -> list[Finished]:
        """The group's result, best first where there is an order."""
        ...
