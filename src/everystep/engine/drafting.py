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
from everystep.engine.apply import forget
from everystep.engine.feed import Feeds, Grant
from everystep.engine.guests import Failed, Host, together_or_apart, unused
from everystep.engine.lengths import Costs, Lengths, note_reading
from everystep.types import Group, Request, Sequence
from everystep.types.request import Drafter, Drafting, WantedDraft


@dataclass(slots=True)
class Drafters:
    """The drafters at work for an engine, by the value that each was started from: a guest.

    Of the step that goes on, `choosing`: how many sequences choose, 0 where no drafter is asked;
    and where one is, `drafting_seconds`: what drafting took; `since`: when it was over; `accepted`:
    how many drafted ids the engine had accepted before.
    """

    host: Host
    lengths: Lengths
    at_work: dict[Drafter, Drafting] = field(default_factory=dict)
    drafting_seconds: float = 0.0
    since: float = 0.0
    choosing: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, host: Host) -> Drafters:
        """Make the guest of an engine, at which no drafter works yet."""
        return cls(host, Lengths(Costs(host.clock)))

    def open(self, request: Request) -> None:
        """Let the request's drafter work; RequestError if it cannot draft for the vocabulary."""
        drafter = request.drafter
        if drafter is not None and drafter not in self.at_work:
            self.at_work[drafter] = drafter.start(self.host.executor.vocab_size)

    def before(self, grants: list[Grant], feeds: Feeds, groups: list[Group]) -> Failed:
        """Add the ids that may follow the sequences of groups that choose; return those whose
        drafter fails."""
        self.choosing = 0
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
        self.accepted = self.host.counts.accepted
        self.choosing = sum(len(group.live) for group in feeds.ready)
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

    def after(self, feeds: Feeds) -> None:
        """Note what the step has cost, and what its drafts have gained."""
        if not self.choosing:
            return
        positions, costs = sum([one.positions for one in feeds.made]), self.lengths.costs
        if not positions or sum([one.logits for one in feeds.made]) != positions:
            return  # positions of prompts cost less, as nobody reads their logits
        extra = (self.host.counts.accepted - self.accepted) / self.choosing
        copies = [one for added in feeds.added.values() for one in added.alternatives]
        times = costs.clock() - self.since, self.drafting_seconds
        plain = len(feeds.made) - sum([len(one.units) for one in copies])
        costs.note_step(positions, plain, extra, *times)

    def restart(self) -> None:
        """Let every drafter drop what it holds for sequences."""
        for drafting in self.at_work.values():
            drafting.restart()

    def held(self) -> int:
        """Count the cache rows that drafters hold."""
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
            WantedDraft(alternative(sequence, feeds) if rank else sequence, most, rank)
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
                added = feeds.adding(sequence)
                added.draft = ids
                added.drawn_from = None if draft.scores is None else draft.scores[: len(ids)]
        for sequence in sequences:
            fork_rows(sequence, feeds)

    def _known(self, draft: np.ndarray) -> np.ndarray:
        """The draft up to the first id beyond the vocabulary, as prompts may hold them."""
        beyond = np.flatnonzero(draft >= self.host.executor.vocab_size)
        return draft[: beyond[0]] if len(beyond) else draft

    def _restart(self, drafter: Drafter, groups: list[Group], feeds: Feeds) -> None:
        """Makes the drafter and the sequences that use it drop everything."""
        using = [group for group in groups if group.request.drafter == drafter]
        drop_alternatives(using, feeds)
        for sequence in [one for group in using for one in group.live]:
            forget(sequence)
        self.at_work[drafter].restart()


def _drafts(group: Group, sequence: Sequence) -> bool:
    """Tell whether a draft may follow the sequence.

    Where a draft may be rejected by chance, siblings that open together would have it in common,
    and so not be drawn independently.
    """
    request = group.request
    if not group.opened and request.verification.rejects and request.strategy.width > 1:
        return False
    return sequence.finish is None and _room(sequence) > 0


def _room(sequence: Sequence) -> int:
    """Count the tokens that may follow a sequence in addition to the one that it chooses now."""
    return sequence.request.max_length - sequence.length - 1
