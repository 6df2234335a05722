"""Several drafts of one sequence, verified in one forward: together they are a tree.

The first stands in the sequence's own feed. Each other one, an *alternative*, begins with another
id and stands in the feed of a copy of the sequence, on a line of its own and on a fork of its row:

    sequence      [ cached | last token | first draft  ]
    alternative   [ fork   | last token | other draft  ]

To the strategy and to everything between, a copy is a sequence like any other. At most one of them
goes on, the one whose draft was right for longest; the step drops the rest.
"""

from __future__ import annotations

from everystep.engine.apply import Change, forget, release, sprout
from everystep.engine.feed import Feeds, fed
from everystep.engine.ledger import Ledger
from everystep.types import Companion, Group, Sequence, TokenTable


def drafts_at_most(group: Group, sequence: Sequence) -> int:
    """Return how many drafts of the sequence may be verified at once.

    One before its group has opened, where anything but its last token is still to be fed, and where
    a caller's criteria read the scores of the steps so far, of which there is one per token.
    """
    request = group.request
    if not group.opened or request.wants.history:
        return 1
    waiting = any(unit.row is None for unit in sequence.units)
    if waiting or sequence.pending > len(sequence.units):
        return 1
    return request.drafts


def alternative(sequence: Sequence, feeds: Feeds) -> Sequence:
    """A copy of the sequence without rows, for this step."""
    copy = sprout(sequence, feeds.table.fork(sequence.line, sequence.visible), sequence.lineage)
    copy.companions = tuple(Companion(one.prompt) for one in sequence.companions)
    copy.row = None
    feeds.adding(sequence).alternatives.append(copy)
    return copy


def fork_rows(sequence: Sequence, feeds: Feeds) -> None:
    """The alternatives of a sequence that have a draft hold what it holds; others are dropped."""
    copies, drafted = feeds.added_to(sequence).alternatives, list[Sequence]()
    for copy in copies:
        if not len(feeds.added_to(copy).draft):
            _drop(copy, feeds.table, feeds.ledger)
            continue
        for unit, source in zip(copy.units, sequence.units, strict=True):
            assert source.row is not None, "see drafts_at_most"
            unit.row, unit.cached = feeds.ledger.fork(source.row), source.cached
        drafted.append(copy)
    if copies:
        feeds.adding(sequence).alternatives = drafted


def drop_alternatives(groups: list[Group], feeds: Feeds) -> None:
    """The groups have none any more, in a step that they do not take."""
    for sequence in [s for group in groups for s in group.live]:
        added = feeds.added.pop(id(sequence), None)
        for copy in added.alternatives if added is not None else ():
            feeds.added.pop(id(copy), None)
            forget(copy)
            _drop(copy, feeds.table, feeds.ledger)


def drop_outdone(change: Change, feeds: Feeds) -> None:
    """Free what was fed for a group and does not go on."""
    if not feeds.added:
        return
    settled = {sequence.line for sequence in change.after.live} | {*change.closed}
    for one in fed(change.group, feeds):
        if one.line not in settled:
            release(one, feeds.ledger)
            change.closed.append(one.line)


def _drop(copy: Sequence, table: TokenTable, ledger: Ledger) -> None:
    release(copy, ledger)
    table.close(copy.line)
