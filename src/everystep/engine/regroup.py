"""Sequences that lost their rows: what all of them share is fed once, by the first, and forked.

    first     [ prompt | tokens that all share | own tokens ]   is fed up to the end of the shared
    others    [ prompt | tokens that all share | own tokens ]   fork its row there, and go on

A group begins with one sequence, so that only a preemption or a broken step leads here.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from everystep.engine.ledger import Ledger
from everystep.types import (
    COLUMNS,
    Columns,
    Companion,
    Group,
    Prompt,
    Sequence,
    TokenTable,
    companion_length,
)


def regroup(group: Group, table: TokenTable, ledger: Ledger) -> None:
    """Sequences without rows are forks of the first, if it holds all that they share."""
    if not _scattered(group) or owed(group, table):
        return
    lead, *others = group.live
    for other in others:
        for unit, source in zip(other.units, lead.units, strict=True):
            if unit.row is None and source.row is not None:
                unit.row, unit.cached = ledger.fork(source.row), source.cached
        _share_columns(lead, other)


def _share_columns(lead: Sequence, other: Sequence) -> None:
    """The other knows the hidden states of what both share, if the first knows them."""
    known: Columns | None = lead.memo.get(COLUMNS)
    own: Columns | None = other.memo.get(COLUMNS)
    if known is not None and (own is None or own.length < other.cached):
        other.memo[COLUMNS] = shared = known.copy()
        shared.rewind(other.cached + other.request.shift)


def owed(group: Group, table: TokenTable) -> int:
    """How many positions the first sequence feeds before the others can fork its rows.

    0 where all have rows, and where there is nothing to share.
    """
    return sum(one.missing for one in debts(group, table)) if _scattered(group) else 0


class Debt(NamedTuple):
    """How many shared positions a sequence or companion with this prompt has still to feed."""

    unit: Sequence | Companion
    prompt: Prompt
    missing: int


def debts(group: Group, table: TokenTable) -> list[Debt]:
    """What the first sequence and its companions lack of what all sequences share."""
    lead = group.live[0]
    own = lead.length - _shared(group.live, table)
    lacks = [Debt(lead, lead.request.prompt, lead.length - own - lead.cached)]
    for one in lead.companions:
        lacks.append(Debt(one, one.prompt, companion_length(lead, one) - own - one.cached))
    return lacks


def _scattered(group: Group) -> bool:
    return len(group.live) > 1 and any(sequence.row is None for sequence in group.live)


def _shared(live: Items[Sequence], table: TokenTable) -> int:
    """How many positions all sequences begin with, leaving each at least one of its own."""
    request = live[0].request
    tails = [table.data[s.line, request.prompt_visible : s.visible - 1] for s in live]
    return request.prompt.length + common_length(tails)


def common_length(tails: Items[np.ndarray]) -> int:
    """How many ids all tails begin with."""
    length = min(map(len, tails), default=0)
    for tail in tails[1:]:
        differ = (tail[:length] != tails[0][:length]).nonzero()[0]
        if len(differ):
            length = int(differ[0])
    return length
