"""Groups that go on from what another one knows: forks of it, and groups whose ids were changed.

    row of the old sequence   [ cached: prompt | ids that both share | others ]
    new sequence              [ prompt | ids that both share | its own ids     ]
                                inherits the row, cut to here ^      ^ is fed

What was chosen and what was given are alike here: ids after the prompt. Nothing is written that
could not be made again from ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from everystep.engine.apply import Change, release, sprout
from everystep.engine.feed import units_of
from everystep.engine.ledger import Ledger
from everystep.types import COLUMNS, Columns, Companion, Group, Request, Sequence, TokenTable
from everystep.types.table import common_length


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """The beginning of a sequence after its prompt: ids, (n,) int64, and what it remembers of them
    that ids cannot tell."""

    tokens: np.ndarray
    values: Mapping[str, Any] = field(default_factory=dict)
    lineage: int = 0


class Known(NamedTuple):
    """The knowledge of a group that another strategy goes on with, and whether that settles it."""

    state: Any
    settled: bool


def forked(
    group: Group, twin: Group, table: TokenTable, ledger: Ledger, known: Known | None = None
) -> Group:
    """Return what `twin` becomes: all that the group is, on lines of its own and forks of its
    rows."""
    request, after = twin.request, group.without_live()
    if known is not None:
        after.state, after.settled, after.reported = known.state, known.settled, 0
    after.request, after.rank, after.best = request, twin.rank, twin.best
    for sequence in group.live:
        line = -1 if sequence.line < 0 else table.fork(sequence.line, sequence.visible)
        # A drafter's row is its own, and made again from the ids.
        memo = {key: one for key, one in sequence.memo.items() if not hasattr(one, "release")}
        copy = sprout(Sequence(request, -1, 0, memo=memo), line, sequence.lineage)
        copy.length, copy.cached, copy.row = sequence.length, sequence.cached, sequence.row
        copy.score, copy.index = sequence.score, sequence.index
        copy.provisional, copy.finish = sequence.provisional, sequence.finish
        copy.companions = tuple(
            Companion(prompt, one.cached, one.row)
            for prompt, one in zip(request.companions, sequence.companions, strict=True)
        )
        for unit in copy.units:
            unit.row = None if unit.row is None else ledger.fork(unit.row)
        after.live.append(copy)
    return after


def reopened(
    group: Group,
    after: Group,
    past: Beginning,
    table: TokenTable,
    ledger: Ledger,
    *,
    cuts: bool,
) -> Change:
    """Return what the group becomes with the request of `after`: one sequence, which has not chosen
    yet.

    `cuts`: rows can be cut back to any length; where they cannot, one that holds too much is given
    up and fed again.
    """
    request, tokens = after.request, past.tokens
    line = table.open(np.concatenate([request.visible_prompt(), tokens]))
    sequence = Sequence(
        request,
        line,
        request.prompt.length + len(tokens),
        request.prompt.start,
        lineage=past.lineage,
        memo=dict(past.values),
        companions=tuple(Companion(one, one.start) for one in request.companions),
    )
    change = Change(group, after)
    after.prompt_known = group.prompt_known
    shared = [_shared(old, tokens, table) for old in group.live]
    if shared and _given_alike(group.request, request):
        donor = group.live[int(np.argmax(shared))]
        _inherit(sequence, donor, max(shared), ledger, cuts=cuts)
    for old in group.live:
        release(old, ledger)
        if old.line >= 0:
            change.closed.append(old.line)
    after.live = [sequence]
    return change


def _given_alike(old: Request, new: Request) -> bool:
    """Tell whether positions of both are given the same beside ids; what hooks give may depend on
    how long a sequence may become."""
    lengths = old.max_length == new.max_length or not new.hooks
    adapters = old.adapters == new.adapters and old.resolved == new.resolved
    return adapters and old.hooks == new.hooks and lengths


def _shared(old: Sequence, tokens: np.ndarray, table: TokenTable) -> int:
    """Count the ids after the prompt that the sequence and the new one begin with; -1 without a
    row."""
    if old.row is None:
        return -1
    return common_length([table.data[old.line, old.request.prompt_visible : old.visible], tokens])


def _inherit(
    sequence: Sequence, donor: Sequence, shared: int, ledger: Ledger, *, cuts: bool
) -> None:
    """The sequence takes over the donor's rows, up to the ids that both share, and what is known of
    hidden states there; it keeps at least one position to feed."""
    for (unit, prompt, length), source in zip(units_of(sequence), donor.units, strict=True):
        if source.row is None:
            continue
        kept = min(source.cached, prompt.length + shared, length - 1)
        if kept < source.cached and not cuts:
            continue
        unit.row, unit.cached = source.row, kept
        if kept < source.cached:
            ledger.truncate(source.row, kept)
        source.row = None
    columns: Columns | None = donor.memo.get(COLUMNS)
    if columns is not None and sequence.row is not None:
        columns.rewind(sequence.cached + sequence.request.shift)
        sequence.memo[COLUMNS] = columns
