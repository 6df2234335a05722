"""How long drafts are, and how many: the schedules, and what tells whether a draft pays.

This is the one place where a choice depends on a clock. It changes how many tokens a step verifies
and never which tokens come out, so it is only asked where drafts are judged by whether they match.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from everystep.engine.layout import Layout
from everystep.types import Sequence
from everystep.types.request import Drafter

_KEY = "drafts"
_SAMPLES = 5  # of which the median counts
_TRIED = 2  # how long a draft is that is made to see how drafts do
_SHARE = 0.01  # of the time that such drafts may cost
_MARGIN = 1.05  # by which a draft must be expected to pay
_FADING = 0.9  # what each later draft leaves of the weight of earlier ones
_MUCH = 16  # ids that a drafter may read before a guess whose cost is one of guesses
_SLOPE = 0.1  # of a step's cost that a further position is taken to add, before that is known


class Odds(NamedTuple):
    """Counts of right and of wrong guesses, in which the latest weigh most."""

    right: float = 1.0
    wrong: float = 1.0

    def after(self, right: int, wrong: int) -> Odds:
        return Odds(_FADING * self.right + right, _FADING * self.wrong + wrong)

    @property
    def chance(self) -> float:
        """The probability that the next guess is right."""
        return self.right / (self.right + self.wrong)


_EVEN = Odds()
_RARELY = Odds(1.0, 3.0)  # how alternatives are taken to do before that is known


@dataclass(slots=True)
class DraftRecord:
    """The success of a sequence's drafts so far: a memory, without which they begin anew.

    `tokens`: how long they are by the heuristic schedule. `guesses`: those of first drafts, up to
    the first wrong one. `others`: of each alternative, its first guess. `read`: how many ids there
    were when the last draft was made.
    """

    tokens: int
    guesses: Odds = _EVEN
    others: tuple[Odds, ...] = ()
    read: int = 0

    def copy(self) -> DraftRecord:
        return DraftRecord(self.tokens, self.guesses, self.others, self.read)

    def rewind(self, length: int) -> None:
        """Taking ids back does not change how drafts did."""

    def note(self, drafted: int, accepted: int) -> None:
        """One first draft more."""
        whole = accepted == drafted
        self.tokens = self.tokens + 2 if whole else max(1, self.tokens - 1)
        self.guesses = self.guesses.after(accepted, not whole)

    def note_others(self, count: int, right: int | None) -> None:
        """The alternatives of one draft more, of which one or none was right."""
        known = (*self.others, *[_RARELY] * (count - len(self.others)))
        self.others = tuple(
            odds.after(rank == right, rank != right) if rank < count else odds
            for rank, odds in enumerate(known)
        )

    def chances(self, count: int) -> list[float]:
        """Return how likely the first guesses of so many drafts are right."""
        known = (*self.others, *[_RARELY] * (count - 1 - len(self.others)))
        return [odds.chance for odds in (self.guesses, *known)][:count]


def record_of(sequence: Sequence, drafter: Drafter) -> DraftRecord:
    """Return what the sequence remembers of its drafts."""
    found = sequence.memo.get(_KEY)
    if not isinstance(found, DraftRecord):
        found = sequence.memo[_KEY] = DraftRecord(drafter.tokens)
    return found


def note_reading(sequences: list[Sequence], drafter: Drafter) -> bool:
    """The sequences are drafted for now; whether the drafter has much to read before."""
    much = False
    for sequence in sequences:
        record = record_of(sequence, drafter)
        much |= sequence.visible - record.read > _MUCH
        record.read = sequence.visible
    return much


def note_drafts(layout: Layout, parents: list[int], accepted: list[int]) -> None:
    """The parents, those of the S sequences that go on, remember how many ids of their drafts were
    right, and which of their alternatives."""
    drafts = Counter(layout.origin)
    for parent, right in zip(parents, accepted, strict=True):
        sequence, first = layout.sequences[parent], layout.origin[parent]
        drafter, draft = sequence.request.drafter, layout.drafts[first]
        if drafter is None:
            continue
        record = record_of(sequence, drafter)
        if len(draft):
            record.note(len(draft), right if parent == first else 0)
        if drafts[first] > 1:
            record.note_others(drafts[first] - 1, None if parent == first else parent - first - 1)


class Latest(NamedTuple):
    """The latest seconds of one count with their median: one value, so that an interrupt leaves
    both or neither."""

    seconds: tuple[float, ...]
    median: float

    @staticmethod
    def of(seconds: tuple[float, ...]) -> Latest:
        return Latest(seconds, float(np.median(seconds)))


@dataclass(slots=True)
class Measured:
    """Seconds by a count, as they were measured: of each the latest, whose median counts."""

    latest: dict[int, Latest] = field(default_factory=dict)

    def note(self, count: int, seconds: float) -> None:
        earlier = self.latest[count].seconds if count in self.latest else ()
        self.latest[count] = Latest.of((*earlier, seconds)[-_SAMPLES:])

    def at(self, counts: np.ndarray) -> np.ndarray:
        """Seconds of so many each, going by the counts that were measured; a greater count never
        takes less."""
        measured = np.array(sorted(self.latest), dtype=np.float64)
        known = np.maximum.accumulate([self.latest[int(one)].median for one in measured])
        slope = known[-1] * _SLOPE
        if len(measured) > 1:
            slope = (known[-1] - known[-2]) / (measured[-1] - measured[-2])
        beyond = np.maximum(counts - measured[-1], 0)
        return np.interp(counts, measured, known) + slope * beyond

    def knows(self, count: int) -> bool:
        """Tell whether the count was measured, or a smaller and a greater one."""
        if count in self.latest and len(self.latest[count].seconds) > 1:
            return True
        return min(self.latest, default=count) < count < max(self.latest, default=count)


@dataclass(slots=True)
class Costs:
    """The times that steps and drafts of one engine were measured to take.

    `steps`: by positions fed, those in which a drafter was at work and that read the logits of
    every position. `rounds`: of each drafter, one guess by so many sequences. `elapsed`: seconds of
    all such steps; `spent`: of that, what was lost to drafts that did not pay. `gained_seconds`:
    what plain decoding would have taken more.
    """

    clock: Callable[[], float] = time.perf_counter
    steps: Measured = field(default_factory=Measured)
    rounds: dict[Drafter, Measured] = field(default_factory=dict)
    elapsed: float = 0.0
    spent: float = 0.0
    gained_seconds: float = 0.0

    def note_round(self, drafter: Drafter, sequences: int, guesses: int, seconds: float) -> None:
        """A drafter took so long for drafts of so many ids at most, after so many sequences."""
        self.rounds.setdefault(drafter, Measured()).note(sequences, seconds / guesses)

    def note_step(
        self, fed: int, plain: int, extra: float, seconds: float, drafting: float
    ) -> None:
        """A step took so long beside drafting; without drafts it would have fed `plain` positions.

        `extra`: how many tokens more each sequence got, on average.
        """
        gain = -drafting
        if fed > plain and self.steps.latest:
            (once,) = self.steps.at(np.array([plain])).tolist()
            gain += once * (1 + extra) - seconds
        self.gained_seconds += gain
        self.spent -= min(gain, 0.0)
        self.elapsed += seconds + drafting
        self.steps.note(fed, seconds)

    @property
    def allow_trying(self) -> bool:
        """True if so little was lost that a draft may be made to see how it does."""
        return self.spent <= _SHARE * self.elapsed


@dataclass(slots=True)
class Lengths:
    """The choice of how many ids each sequence's draft may have.

    `idle`: drafters whose drafts did not pay when they were last asked, with how many positions
    that step fed without them.
    """

    costs: Costs = field(default_factory=Costs)
    idle: dict[Drafter, int] = field(default_factory=dict)

    def is_idle(self, drafter: Drafter, fed: int) -> bool:
        """Tell whether nothing has changed since drafts of it did not pay."""
        return self.idle.get(drafter) == fed and not self.costs.allow_trying

    def forget(self, drafter: Drafter) -> None:
        """The drafter is not used any more."""
        self.costs.rounds.pop(drafter, None)
        self.idle.pop(drafter, None)

    def limits(
        self,
        drafter: Drafter,
        sequences: list[Sequence],
        rooms: list[int],
        most_drafts: list[int],
        fed: int,
    ) -> list[list[int]]:
        """Of each draft of the sequences, at most so many ids and drafts of each, in a step that
        feeds so many positions without drafts."""
        if drafter.schedule == "costs":
            wanted = self._paying(drafter, sequences, most_drafts, fed)
        elif drafter.schedule == "heuristic":
            tokens = [record_of(sequence, drafter).tokens for sequence in sequences]
            wanted = [[one] * drafts for one, drafts in zip(tokens, most_drafts, strict=True)]
        else:
            wanted = [[drafter.tokens] * drafts for drafts in most_drafts]
        return [[min(one, room) for one in own] for own, room in zip(wanted, rooms, strict=True)]

    def _paying(
        self, drafter: Drafter, sequences: list[Sequence], most_drafts: list[int], fed: int
    ) -> list[list[int]]:
        """As many as the measured costs justify. Where none is, one sequence now and then has a
        draft to see what drafts cost and how they do."""
        costs, wanted = self.costs, [[0] for _ in sequences]
        if not costs.steps.knows(fed):
            return wanted
        records = [record_of(sequence, drafter) for sequence in sequences]
        if drafter in costs.rounds and max(costs.steps.latest) > fed:
            chances = chances_of(records, most_drafts)
            units = max([1 + len(sequence.companions) for sequence in sequences])
            found = best_lengths(costs, drafter, chances, fed, units)
            if any(map(any, found)):
                self.idle.pop(drafter, None)
                return found
        if drafter in costs.rounds:
            self.idle[drafter] = fed
        if drafter not in costs.rounds or costs.allow_trying:
            wanted[_cheapest(sequences, records)] = [min(_TRIED, drafter.tokens)]
        return wanted


def _cheapest(sequences: list[Sequence], records: list[DraftRecord]) -> int:
    """The sequence of which a drafter has little to read, or else the one read longest ago."""

    def price(s: int) -> tuple[bool, int]:
        return sequences[s].visible - records[s].read > _MUCH, records[s].read

    return min(range(len(records)), key=price)


def chances_of(records: list[DraftRecord], most_drafts: list[int]) -> list[list[float]]:
    """Of each sequence, how likely the first guesses of its drafts are right; one without a draft
    so far is taken to do as the others do."""
    known = [record.guesses for record in records if record.guesses != _EVEN]
    usual = Odds(sum(odds.right for odds in known), sum(odds.wrong for odds in known))
    expected = usual.chance if known else _EVEN.chance
    found = [record.chances(most) for record, most in zip(records, most_drafts, strict=True)]
    for record, chances in zip(records, found, strict=True):
        if record.guesses == _EVEN:
            chances[0] = expected
    return found


def best_lengths(
    costs: Costs, drafter: Drafter, chances: list[list[float]], fed: int, units: int = 1
) -> list[list[int]]:
    """Choose how many ids each draft of each sequence may have, so that the step gives the most
    tokens per second.

    `chances`: how likely the first guess of each draft is right. A guess whose chance is q for the
    first place of its draft, and p for each that follows, adds q * p^j tokens at place j; p is that
    of the sequence's first draft. Guesses are added in the order of what they add, for as long as
    that pays. `fed`: positions that the step feeds without drafts; `units`: how many each guess
    adds, as companions are fed it too. An alternative feeds the last token once more.
    """
    drafts = [(s, d) for s, own in enumerate(chances) for d in range(len(own))]
    first = np.array([chances[s][d] for s, d in drafts])
    later = np.array([chances[s][0] for s, _ in drafts])
    places = np.arange(drafter.tokens)
    gains = first[:, None] * later[:, None] ** places
    added = np.ones(gains.shape)
    added[[d > 0 for _, d in drafts], 0] = 2
    order = np.argsort(-gains, axis=None, kind="stable")
    owner, place = np.divmod(order, len(places))
    seconds = costs.steps.at(fed + units * added.ravel()[order].cumsum())
    seconds = seconds + _rounds(costs.rounds[drafter], place, len(drafts))
    chosen = fed / units  # tokens that the step gives without drafts
    rates = (chosen + gains.ravel()[order].cumsum()) / seconds
    (plain,) = chosen / costs.steps.at(np.array([fed]))
    best = int(rates.argmax())
    pays = rates[best] > _MARGIN * plain
    counts = np.bincount(owner[: best + 1 if pays else 0], minlength=len(drafts)).tolist()
    return [[counts.pop(0) for _ in own] for own in chances]


def _rounds(measured: Measured, place: np.ndarray, drafts: int) -> np.ndarray:
    """Seconds that a drafter takes for the first guess, the first two, ... of those that stand at
    these places of their drafts: a round makes the guesses of one place."""
    taken = np.append(0.0, measured.at(np.arange(1, drafts + 1)))
    before = np.empty_like(place)
    before[np.argsort(place, kind="stable")] = np.tile(np.arange(drafts) + 1, len(place) // drafts)
    return (taken[before] - taken[before - 1]).cumsum()
