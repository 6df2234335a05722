"""A bound for thoughts: after so many tokens of them their closing mark is forced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from torch import Tensor

from everystep.processors.base import Overwriting, remembers
from everystep.text import Spelling
from everystep.types import Rows, Sequence

_KEY = "thoughts"
_LONGEST_CHARACTER = 4  # bytes


@dataclass(frozen=True)
class ThoughtBudget(Overwriting):
    """After `tokens` tokens within thoughts nothing may follow but `closing`, id by id. A character
    that these tokens began is completed first.

    `opening` and `mark`: the texts that begin and end a thought. `thinks`: the prompt ends within
    one. `anywhere`: thoughts may begin after something else, and count together. Marks are found in
    the bytes of the ids, however these divide them.
    """

    tokens: int
    opening: str
    mark: str
    closing: tuple[int, ...]
    thinks: bool
    anywhere: bool
    spelling: Spelling

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        keeps = remembers(rows)
        lines, lengths = rows.table.data, rows.lengths.tolist()
        for r, (sequence, length) in enumerate(zip(rows.sequences, lengths, strict=True)):
            forced = self._place(sequence, keeps).forced(lines[sequence.line], length)
            if forced is not None:
                kept = scores[r, forced].clone()
                scores[r] = -math.inf
                scores[r, forced] = kept
        return scores

    def _place(self, sequence: Sequence, keeps: bool) -> ThoughtPlace:
        """Return the place of a sequence: the one it remembers, or a new one if nothing is kept."""
        memo = sequence.memo if keeps else {}
        found: ThoughtPlace | None = memo.get(_KEY)
        if found is None or found.budget != self:
            found = memo[_KEY] = ThoughtPlace(self, sequence.request.prompt_visible)
        return found


class _Phase(Enum):
    BEFORE = 0
    INSIDE = 1
    CLOSING = 2
    AFTER = 3


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a text after some ids: the bytes in which a mark may be found, how many tokens
    were thoughts, and how many ids of the closing mark stand."""

    phase: _Phase
    tail: bytes = b""
    spent: int = 0
    closed: int = 0


class ThoughtPlace:
    """The place that a text has reached in its thoughts: a memory of the ids after the prompt."""

    __slots__ = ("_beyond", "_states", "budget", "start")

    def __init__(self, budget: ThoughtBudget, start: int) -> None:
        self.start = start
        self.budget = budget
        first = _State(_Phase.INSIDE if budget.thinks else _Phase.BEFORE)
        self._states = [self._bounded(first)]
        self._beyond = 0  # ids after the last state, which is over

    @property
    def length(self) -> int:
        """The number of ids that it covers, those before `start` included."""
        return self.start + len(self._states) - 1 + self._beyond

    def forced(self, line: np.ndarray, length: int) -> int | None:
        """Return the id that has to follow the first `length` ids of a line, None if any may."""
        if length < self.length:
            self.rewind(length)
        for token in line[self.length : length].tolist():
            if self._states[-1].phase is _Phase.AFTER:
                self._beyond += 1
            else:
                self._states.append(self._next(self._states[-1], token))
        state = self._states[-1]
        return self.budget.closing[state.closed] if state.phase is _Phase.CLOSING else None

    def rewind(self, length: int) -> None:
        """Cuts it back to at most the first `length` ids."""
        excess = self.length - max(length, self.start)
        if excess <= 0:
            return
        beyond = min(excess, self._beyond)
        self._beyond -= beyond
        del self._states[len(self._states) - (excess - beyond) :]

    def copy(self) -> ThoughtPlace:
        """Return one that stands there too; what changes is not shared."""
        other = ThoughtPlace(self.budget, self.start)
        other._states, other._beyond = list(self._states), self._beyond
        return other

    def _next(self, state: _State, token: int) -> _State:
        """Return the state after a further id."""
        budget = self.budget
        if state.phase is _Phase.CLOSING and token == budget.closing[state.closed]:
            closed = state.closed + 1
            over = closed == len(budget.closing)
            return (
                self._over(state.spent)
                if over
                else _State(_Phase.CLOSING, b"", state.spent, closed)
            )
        tail = state.tail + budget.spelling(token)
        if state.phase is _Phase.BEFORE:
            return self._bounded(self._before(tail, state.spent))
        mark = budget.mark.encode()
        if mark in tail:
            return self._over(state.spent + 1)
        kept = tail[-max(len(mark), _LONGEST_CHARACTER) :]
        return self._bounded(_State(_Phase.INSIDE, kept, state.spent + 1))

    def _before(self, tail: bytes, spent: int) -> _State:
        """Return the state of a text in which no thought has begun yet."""
        opening = self.budget.opening.encode()
        if self.budget.anywhere:
            begun = opening in tail
            return _State(
                _Phase.INSIDE if begun else _Phase.BEFORE,
                b"" if begun else tail[-len(opening) :],
                spent,
            )
        said = tail.lstrip()[: len(opening)]
        if said == opening:
            return _State(_Phase.INSIDE, tail.lstrip()[len(opening) :], spent)
        going = opening.startswith(said) and len(tail) < 64 + len(opening)
        return _State(_Phase.BEFORE if going else _Phase.AFTER, tail, spent)

    def _over(self, spent: int) -> _State:
        again = self.budget.anywhere
        return _State(_Phase.BEFORE if again else _Phase.AFTER, b"", spent)

    def _bounded(self, state: _State) -> _State:
        """Return the state, or that of a thought which has to end now."""
        over = state.spent - self.budget.tokens
        if state.phase is not _Phase.INSIDE or over < 0:
            return state
        waits = over < _LONGEST_CHARACTER - 1 and not _ends_whole(state.tail)
        return state if waits else _State(_Phase.CLOSING, b"", state.spent)


def _ends_whole(text: bytes) -> bool:
    """Return False where the last character of a text in UTF-8 is still to be completed."""
    for back in range(1, min(len(text), _LONGEST_CHARACTER) + 1):
        byte = text[-back]
        if byte < 0x80:
            return True
        if byte >= 0xC0:
            return back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
