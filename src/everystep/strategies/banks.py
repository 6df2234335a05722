"""Candidates of a search, the bank of what has ended, and children while they are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from everystep.strategies.base import undrawable
from everystep.types import FinishReason
from everystep.types.stored import stored

_LIMITS = ("length", "time")


class Candidate(NamedTuple):
    """A token after a beam: its accumulated score, the beam's place in the batch, why it ends."""

    score: float
    parent: int
    token: int
    reason: FinishReason | None

    @property
    def cut(self) -> bool:
        """True if the whole search ends here, at a limit."""
        return self.reason is not None and self.reason.kind in _LIMITS

    @property
    def ended(self) -> bool:
        """True if this hypothesis is complete, and not only cut."""
        return self.reason is not None and not self.cut


@stored("search bank")
@dataclass(frozen=True)
class SearchBank:
    """Scores and numbers of the best finished hypotheses, in the order in which they came; whether
    no more can come."""

    scores: tuple[float, ...] = ()
    serials: tuple[int, ...] = ()
    closed: bool = False

    def with_one(self, score: float, serial: int, most: int) -> SearchBank:
        """Return the bank with one more, if it is among the `most` best; the first worst goes."""
        if len(self.scores) >= most and not score > min(self.scores):
            return self
        scores, serials = [*self.scores, score], [*self.serials, serial]
        if len(scores) > most:
            worst = scores.index(min(scores))
            del scores[worst], serials[worst]
        return SearchBank(tuple(scores), tuple(serials))

    def after(self, attainable: float, most: int) -> SearchBank:
        """Close the bank if it holds as many as it may and no better score is to be expected."""
        if len(self.scores) < most or min(self.scores) < attainable:
            return self
        return SearchBank(self.scores, self.serials, True)


@dataclass(slots=True)
class Offspring:
    """Children as lists, while they are found."""

    parents: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish: list[FinishReason | None] = field(default_factory=list)
    index: list[int] = field(default_factory=list)
    serial: list[int] = field(default_factory=list)

    def add(self, one: Candidate, score: float, index: int = 0, serial: int = -1) -> None:
        """Add one child, which ends if it has a number."""
        self.parents.append(one.parent)
        self.tokens.append(one.token)
        self.scores.append(score)
        self.finish.append(one.reason if serial >= 0 else None)
        self.index.append(index)
        self.serial.append(serial)

    def lose(self, first: int, width: int) -> None:
        """End the beams of a request: no token can be chosen."""
        for index in range(width):
            self.add(Candidate(0.0, first + index, 0, None), 0.0, index)
            self.finish[-1] = undrawable()
