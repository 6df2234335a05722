"""Drafters at work: what guesses how sequences go on, so that one forward can verify several
tokens.

A drafter is part of the engine. What looks up ids needs nothing but them (`lookup.py`); a draft
model is a second model with cache rows of its own (`draft_model.py`, `second.py`). Here each is
asked for as many ids, in as many drafts, as their schedule allows (`lengths.py`,
`alternatives.py`), and fails for its own requests alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from everystep.engine.alternatives import (
    alternative,
    drafts_at_most,
    drop_alternatives,
    fork_rows,
)
from everystep.engine.apart import Failed, together_or_apart, unused
from everystep.engine.apply import forget
from everystep.engine.feed import Feeds
from everystep.engine.lengths import Lengths, note_reading
from everystep.types import Group, Sequence
from everystep.types.protocols import Asked, Drafter, Drafting


@dataclass(slots=True)
class Drafters:
    """The drafters at work for an engine, by the value that each was started from.

    Of the step that goes on, `choosing`: how many sequences choose, 0 where no drafter is asked;
    and where one is, `drafting_seconds`: what drafting took; `since`: when it was over; `accepted`:
    how many drafted ids the engine had accepted before.
    """

    at_work: dict[Drafter, Drafting] = field(default_factory=dict)
    vocabulary: int = 0
    lengths: Lengths = field(default_factory=Lengths)
    drafting_seconds: float = 0.0
    since: float = 0.0
    choosing: int = 0
    accepted: int = 0

    def open(self, drafter: Drafter | None, vocabulary: int) -> None:
        """The drafter is at work; RequestError if it cannot draft for such a vocabulary."""
        self.vocabulary = vocabulary
        if drafter is not None and drafter not in self.at_work:
            self.at_work[drafter] = drafter.start(vocabulary)

    def propose(self, feeds: Feeds, groups: list[Group], accepted: int) -> Failed:
        """The feeds of groups that choose hold the ids that may follow their sequences; returns
        those whose drafter fails. `groups`: all that are not over."""
        self.choosing = 0
        if not self.at_work:
            return []
        for drafter in unused(self.at_work, [group.request.drafter for group in groups]):
            del self.at_work[drafter]
            self.lengths.forget(drafter)
        using: dict[Drafter, list[Group]] = {}
        for group in feeds.ready:
            if group.request.drafter is not None:
                using.setdefault(group.request.drafter, []).append(group)
        if not using:
            return []
        clock = self.lengths.costs.clock
        begin = clock()
        self.accepted, self.choosing = accepted, sum(len(group.live) for group in feeds.ready)
        rows = sum(len(one.units) for group in feeds.ready for one in group.live)
        failed: Failed = []
        for drafter, own in using.items():
            if self.lengths.is_idle(drafter, rows):
                continue
            serve = partial(self._ask, drafter, feeds, rows)
            failed += together_or_apart(own, serve, partial(self._restart, drafter, groups, feeds))
        self.since = clock()
        self.drafting_seconds = self.since - begin
        return failed

    def note_step(self, feeds: Feeds, accepted: int) -> None:
        """What the step that is over has cost, and what its drafts have gained."""
        if not self.choosing:
            return
        positions, costs = sum(feeds.counts), self.lengths.costs
        if not positions or sum(feeds.logits) != positions:
            return  # positions of prompts cost less, as nobody reads their logits
        extra = (accepted - self.accepted) / self.choosing
        copies = sum(len(one.units) for own in feeds.alternatives.values() for one in own)
        times = costs.clock() - self.since, self.drafting_seconds
        plain = len(feeds.counts) - copies
        costs.note_step(positions, plain, extra, *times)

    def restart(self) -> None:
        for drafting in self.at_work.values():
            drafting.restart()

    def held(self) -> int:
        """How many cache rows they hold."""
        return sum(drafting.held() for drafting in self.at_work.values())

    def _ask(self, drafter: Drafter, feeds: Feeds, rows: int, groups: list[Group]) -> None:
        """Ids after each of the sequences that have room for more than the choice."""
        drafting, costs = self.at_work[drafter], self.lengths.costs
        begin = costs.clock()
        choosing = [(group, s) for group in groups for s in group.live if _drafts(group, s)]
        if not choosing:
            return
        sequences = [sequence for _, sequence in choosing]
        rooms, most_drafts = list(map(_room, sequences)), [drafts_at_most(*one) for one in choosing]
        limits = self.lengths.limits(drafter, sequences, rooms, most_drafts, rows)
        asked = [
            Asked(alternative(sequence, feeds) if rank else sequence, most, rank)
            for sequence, own in zip(sequences, limits, strict=True)
            for rank, most in enumerate(own)
            if most > 0
        ]
        if not asked:
            return
        reading = note_reading([one.sequence for one in asked], drafter)
        proposed = drafting.propose(asked, feeds.table)
        if not reading:
            guesses = max([one.most for one in asked])
            costs.note_round(drafter, len(asked), guesses, costs.clock() - begin)
        for (sequence, most, _), draft in zip(asked, proposed, strict=True):
            ids = self._known(draft.ids[:most])
            if len(ids):
                feeds.drafts[id(sequence)] = ids
                if draft.scores is not None:
                    feeds.drawn_from[id(sequence)] = draft.scores[: len(ids)]
        for sequence in sequences:
            fork_rows(sequence, feeds)

    def _known(self, draft: np.ndarray) -> np.ndarray:
        """The draft up to the first id beyond the vocabulary, as prompts may hold them."""
        beyond = np.flatnonzero(draft >= self.vocabulary)
        return draft[: beyond[0]] if len(beyond) else draft

    def _restart(self, drafter: Drafter, groups: list[Group], feeds: Feeds) -> None:
        """Makes the drafter and the sequences that use it drop everything."""
        using = [group for group in groups if group.request.drafter == drafter]
        drop_alternatives(using, feeds)
        for sequence in [one for group in using for one in group.live]:
            forget(sequence)
        self.at_work[drafter].restart()


def _drafts(group: Group, sequence: Sequence) -> bool:
    """Whether a draft may follow the sequence.

    Where a draft may be rejected by chance, siblings that open together would have it in common,
    and so not be drawn independently.
    """
    request = group.request
    if not group.opened and request.verification.rejects and request.strategy.width > 1:
        return False
    return sequence.finish is None and _room(sequence) > 0


def _room(sequence: Sequence) -> int:
    """How many tokens may follow a sequence in addition to the one that it chooses now."""
    return sequence.request.max_length - sequence.length - 1
