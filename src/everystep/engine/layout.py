"""Which rows a choice reads: one of every sequence, and one after each token of its draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from everystep.draws import fork_lineage
from everystep.engine.apply import sprout
from everystep.engine.feed import NO_IDS, Feeds, fed
from everystep.types import Companion, Group, Sequence, is_memory


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """R rows of the S sequences of some groups, those of a sequence one after another.

    Alternatives count among the sequences: `origin` is the index of the one that a sequence is a
    copy of, its own for others. Of each sequence, `group_of` is the index of its group, `sources`
    the sequence that was fed for it, `drafts` what was drafted. Of each row, `owner` is the index
    of its sequence, `place` how many drafted tokens it follows, `follow` the sequence as it is
    there. `tries`: of each sequence that was kept of several all their drafts, in order.
    """

    sequences: list[Sequence]
    group_of: list[int]
    sources: list[Sequence]
    origin: list[int]
    drafts: list[np.ndarray]
    owner: list[int]
    place: list[int]
    follow: list[Sequence]
    tries: list[list[np.ndarray]] = field(default_factory=list)

    @property
    def alternatives(self) -> bool:
        """True if any sequence has alternatives."""
        return len(set(self.origin)) < len(self.origin)

    @property
    def drafted(self) -> bool:
        """True if any sequence has more than one row."""
        return len(self.owner) > len(self.sequences)

    @property
    def first(self) -> list[int]:
        """(S,) the first row of each sequence."""
        if not self.drafted:
            return self.owner
        return [row for row, i in enumerate(self.place) if i == 0]

    def of_rows(self, sequences: list[Sequence]) -> list[Sequence]:
        """(S,) sequences -> (R,) the one of each row."""
        return [sequences[s] for s in self.owner] if self.drafted else sequences

    def fed_rows(self, feeds: Feeds) -> list[list[int]]:
        """(R,) rows of the output: of the sequences, then of their first companions, and so on."""
        rows = [[feeds.first_row[id(one)] for one in own] for own in _units(self.sources)]
        if not self.drafted:
            return rows
        pairs = [*zip(self.owner, self.place, strict=True)]
        return [[own[s] + i for s, i in pairs] for own in rows]

    def tried(self, s: int) -> list[np.ndarray]:
        """Return the drafts of a sequence, those that it was kept before among them."""
        drafts = self.tries[s] if self.tries else [self.drafts[s]]
        return [draft for draft in drafts if len(draft)]

    def only(self, kept: list[int]) -> tuple[Layout, list[int]]:
        """The layout of these sequences alone, in rising order, and which rows are theirs."""
        number = {s: i for i, s in enumerate(kept)}
        rows = [row for row, s in enumerate(self.owner) if s in number]
        layout = Layout(
            [self.sequences[s] for s in kept],
            [self.group_of[s] for s in kept],
            [self.sources[s] for s in kept],
            [*range(len(kept))],
            [self.drafts[s] for s in kept],
            [number[self.owner[row]] for row in rows],
            [self.place[row] for row in rows],
            [self.follow[row] for row in rows],
            [
                [draft for draft, one in zip(self.drafts, self.origin, strict=True) if one == own]
                for own in [self.origin[s] for s in kept]
            ],
        )
        return layout, rows


def laid_out(groups: list[Group], feeds: Feeds) -> Layout:
    """The rows of groups that choose together."""
    sequences, group_of, sources = _members(groups, feeds)
    count = len(sequences)
    if not feeds.drafted:
        none, each = [NO_IDS] * count, [*range(count)]
        return Layout(sequences, group_of, sources, each, none, each, [0] * count, sequences)
    drafts = [feeds.added_to(source).draft for source in sources]
    owner = [s for s, draft in enumerate(drafts) for _ in range(1 + len(draft))]
    place = [i for draft in drafts for i in range(1 + len(draft))]
    pairs = zip(owner, place, strict=True)
    follow = [later(sequences[s], i) if i else sequences[s] for s, i in pairs]
    return Layout(
        sequences, group_of, sources, _origins(sources, feeds), drafts, owner, place, follow
    )


def _origins(sources: list[Sequence], feeds: Feeds) -> list[int]:
    """(S,) the index of the sequence itself, or of the one that it is an alternative of."""
    found, last = [*range(len(sources))], 0
    while last < len(sources):
        copies = len(feeds.added_to(sources[last]).alternatives)
        found[last : last + 1 + copies] = [last] * (1 + copies)
        last += 1 + copies
    return found


def _members(groups: list[Group], feeds: Feeds) -> tuple[list[Sequence], list[int], list[Sequence]]:
    """The sequences that choose, their groups, and the sequence that was fed for each."""
    sequences: list[Sequence] = []
    sources: list[Sequence] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        members = fed(group, feeds) if group.opened else opened(group)
        sequences += members
        sources += members if group.opened else group.live * len(members)
        group_of += [g] * len(members)
    return sequences, group_of, sources


def opened(group: Group) -> list[Sequence]:
    """The siblings a group opens with: equal but for rank and lineage."""
    (source,) = group.live
    siblings = [source]
    for index in range(1, group.request.strategy.width):
        # A memory that holds a row, which all of them share, is forked by children alone.
        memo = {key: _seen(value) for key, value in source.memo.items()}
        sibling = sprout(source, source.line, fork_lineage(source.lineage, 0, index), memo)
        sibling.index = index
        siblings.append(sibling)
    return siblings


def _seen(value: Any) -> Any:
    return value.copy() if is_memory(value) and not hasattr(value, "release") else value


def later(sequence: Sequence, drafted: int) -> Sequence:
    """The sequence as it would be after so many of its draft."""
    after = sprout(sequence, sequence.line, sequence.lineage, sequence.memo)
    after.length += drafted
    return after


def _units(sources: list[Sequence]) -> list[list[Sequence] | list[Companion]]:
    """The sequences, then the first companion of each, and so on."""
    found: list[list[Sequence] | list[Companion]] = [sources]
    for k in range(len(sources[0].companions)):
        found.append([source.companions[k] for source in sources])
    return found
