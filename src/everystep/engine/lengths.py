"""How long drafts are: the schedules, and what tells whether a draft pays.

This is the one place where a choice depends on a clock. It changes how many tokens a step verifies
and never which tokens come out, so it is only asked where drafts are judged by whether they match.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from everystep.types import Sequence
from everystep.types.protocols import Drafter

_KEY = "drafts"
_SAMPLES = 5  # of which the median counts
_TRIED = 2  # how long the first drafts are, from which their cost is learned
_PROBE = 2  # how long a draft is that is made to see whether drafts have become better
_SHARE = 0.01  # of the time that such drafts may cost
_MARGIN = 1.02  # by which a draft must be expected to pay
_FADING = 0.9  # what each later draft leaves of what earlier ones have told
_MUCH = 16  # ids that a drafter may read before a guess whose cost counts
_SLOPE = 0.1  # of a step's cost that a further position is taken to add, before that is known


@dataclass(slots=True)
class DraftRecord:
    """How the drafts of a sequence did: a memory, without which they begin anew.

    `tokens`: how long they are by the heuristic schedule. `right`, `wrong`: how many guesses were
    right before a wrong one, and how many wrong ones there were, the latest counting most. `read`:
    how many ids there were when the last draft was made.
    """

    tokens: int
    right: float = 1.0
    wrong: float = 1.0
    read: int = 0

    def copy(self) -> DraftRecord:
        return DraftRecord(self.tokens, self.right, self.wrong, self.read)

    def rewind(self, length: int) -> None:
        """What drafts have told is still so."""

    def note(self, drafted: int, accepted: int) -> None:
        """One draft more."""
        whole = accepted == drafted
        self.tokens = self.tokens + 2 if whole else max(1, self.tokens - 1)
        self.right = _FADING * self.right + accepted
        self.wrong = _FADING * self.wrong + (not whole)

    @property
    def chance(self) -> float:
        """How likely a guess is right where all before it are."""
        return self.right / (self.right + self.wrong)


def record_of(sequence: Sequence, drafter: Drafter) -> DraftRecord:
    """What the sequence remembers of its drafts."""
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


def note_drafts(sequences: list[Sequence], drafts: list[np.ndarray], accepted: list[int]) -> None:
    """The sequences remember how many ids of their drafts were right."""
    for sequence, draft, right in zip(sequences, drafts, accepted, strict=True):
        drafter = sequence.request.drafter
        if len(draft) and drafter is not None:
            record_of(sequence, drafter).note(len(draft), right)


@dataclass(slots=True)
class Costs:
    """What steps and drafts of one engine take, as they were measured.

    `steps`: positions fed -> the latest seconds of such a step, for steps in which a drafter was
    asked and that read the logits of every position. `rounds`: drafter -> seconds per guess.
    `elapsed`: of all such steps; `spent`: of that, what was lost to drafts that did not pay.
    `gained_seconds`: what plain decoding would have taken more.
    """

    clock: Callable[[], float] = time.perf_counter
    steps: dict[int, deque[float]] = field(default_factory=dict)
    rounds: dict[Drafter, deque[float]] = field(default_factory=dict)
    elapsed: float = 0.0
    spent: float = 0.0
    gained_seconds: float = 0.0

    def note_round(self, drafter: Drafter, guesses: int, seconds: float) -> None:
        """A drafter took so long for drafts of so many ids at most."""
        self.rounds.setdefault(drafter, deque(maxlen=_SAMPLES)).append(seconds / guesses)

    def note_step(
        self,
        fed: int,
        plain: int,
        extra: float,
        seconds: float,
        drafting: float,
        *,
        reading: bool = False,
    ) -> None:
        """A step took so long beside drafting; without drafts it would have fed `plain` positions.

        `extra`: how many tokens more each sequence got, on average. `reading`: a drafter had much
        to read before its first guess, which tells nothing of the others.
        """
        if fed > plain and self.steps:
            (once,) = self.seconds(np.array([plain])).tolist()
            gain = once * (1 + extra) - seconds - drafting
            self.gained_seconds += gain
            if not reading:
                self.spent -= min(gain, 0.0)
        self.elapsed += seconds + drafting
        self.steps.setdefault(fed, deque(maxlen=_SAMPLES)).append(seconds)

    def seconds(self, fed: np.ndarray) -> np.ndarray:
        """What steps of so many positions take, going by those that were measured."""
        counts = np.array(sorted(self.steps), dtype=np.float64)
        known = np.maximum.accumulate([median(self.steps[int(one)]) for one in counts])
        slope = known[-1] * _SLOPE
        if len(counts) > 1:
            slope = (known[-1] - known[-2]) / (counts[-1] - counts[-2])
        beyond = np.maximum(fed - counts[-1], 0)
        return np.interp(fed, counts, known) + slope * beyond

    def knows(self, fed: int) -> bool:
        """Whether a step of so many positions was measured, or one of fewer and one of more."""
        if len(self.steps.get(fed, ())) > 1:
            return True
        return min(self.steps, default=fed) < fed < max(self.steps, default=fed)


@dataclass(slots=True)
class Lengths:
    """How many ids each sequence's draft may have."""

    costs: Costs = field(default_factory=Costs)

    def limits(
        self, drafter: Drafter, sequences: list[Sequence], rooms: list[int], fed: int
    ) -> list[int]:
        """For sequences that have room for so many ids, in a step that feeds so many positions
        without drafts."""
        if drafter.schedule == "costs":
            wanted = self._paying(drafter, sequences, fed)
        elif drafter.schedule == "heuristic":
            wanted = [record_of(sequence, drafter).tokens for sequence in sequences]
        else:
            wanted = [drafter.tokens] * len(sequences)
        return [min(most, room) for most, room in zip(wanted, rooms, strict=True)]

    def _paying(self, drafter: Drafter, sequences: list[Sequence], fed: int) -> list[int]:
        """As many as the measured costs justify; the first steps measure them."""
        none = [0] * len(sequences)
        costs = self.costs
        if not costs.knows(fed):
            return none
        if drafter not in costs.rounds or max(costs.steps) <= fed:
            return [min(_TRIED, drafter.tokens)] * len(sequences)
        chances = np.array([record_of(sequence, drafter).chance for sequence in sequences])
        units = max([1 + len(sequence.companions) for sequence in sequences])
        found = best_lengths(costs, drafter, chances, fed, units)
        if not any(found) and costs.spent <= _SHARE * costs.elapsed:
            return [min(_PROBE, drafter.tokens)] * len(sequences)
        return found


def best_lengths(
    costs: Costs, drafter: Drafter, chances: np.ndarray, fed: int, units: int = 1
) -> list[int]:
    """(S,) how many ids to draft, so that the step gives the most tokens per second.

    The j-th guess of a sequence whose guesses are right with chance p adds p^j tokens. Guesses are
    added in the order of what they add, for as long as that pays. `fed`: positions that the step
    feeds without drafts; `units`: how many each guess adds, as companions are fed it too.
    """
    places = np.arange(1, drafter.tokens + 1)
    gains = chances[:, None] ** places
    order = np.argsort(-gains, axis=None, kind="stable")
    owner, place = np.divmod(order, len(places))
    rounds = np.maximum.accumulate(place + 1)
    seconds = costs.seconds(fed + units * np.arange(1, len(order) + 1))
    seconds = seconds + rounds * median(costs.rounds[drafter])
    chosen = fed / units  # tokens that the step gives without drafts
    rates = (chosen + gains.ravel()[order].cumsum()) / seconds
    (plain,) = chosen / costs.seconds(np.array([fed]))
    best = int(rates.argmax())
    if rates[best] <= _MARGIN * plain:
        return [0] * len(chances)
    counts: list[int] = np.bincount(owner[: best + 1], minlength=len(chances)).tolist()
    return counts
