"""Drafts that a grammar forces: where one token alone may follow, it needs no logits to be known.

Such a draft cannot be rejected, since its rivals are all -inf. Where nothing is forced, another
drafter may guess, as far as the grammar allows what it guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from everystep.engine.feed import NO_IDS
from everystep.processors.grammars.grammar import GrammarPlace, has, tokens_in
from everystep.processors.grammars.mask import GrammarMask
from everystep.types import Sequence, TokenTable
from everystep.types.protocols import Draft, Schedule
from everystep.types.request import Drafter, Drafting, WantedDraft

_MOST = 32


@dataclass(frozen=True)
class ForcedTokens:
    """The tokens that a request's grammar forces, up to `tokens` at a time; where it forces none,
    what `beside` guesses, as many as it says."""

    beside: Drafter | None = None
    tokens: int = _MOST
    schedule: ClassVar[Schedule] = "constant"

    @property
    def alternatives(self) -> int:
        return 0 if self.beside is None else self.beside.alternatives

    def start(self, vocabulary: int) -> Drafting:
        beside = None if self.beside is None else self.beside.start(vocabulary)
        guesses = 0 if self.beside is None else self.beside.tokens
        return _Forcing(guesses, beside)


@dataclass(slots=True)
class _Forcing:
    """At work for an engine; `guesses`: how many ids the other drafter may guess."""

    guesses: int
    beside: Drafting | None = field(default=None)

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        places = [_place(one.sequence) for one in asked]
        forced = [_forced(place, one, table) for place, one in zip(places, asked, strict=True)]
        # Nothing else may follow than what is forced.
        found = [Draft(NO_IDS if one.rank else ids) for one, ids in zip(asked, forced, strict=True)]
        free = [a for a, ids in enumerate(forced) if not len(ids)]
        if self.beside is not None and free:
            shorter = [asked[a]._replace(most=min(asked[a].most, self.guesses)) for a in free]
            guesses = self.beside.propose(shorter, table)
            for a, guess in zip(free, guesses, strict=True):
                ids = _allowed(places[a], asked[a].sequence, guess.ids, table)
                found[a] = replace(guess, ids=ids)
        return found

    def restart(self) -> None:
        if self.beside is not None:
            self.beside.restart()

    def held(self) -> int:
        return 0 if self.beside is None else self.beside.held()


def _forced(place: GrammarPlace, asked: WantedDraft, table: TokenTable) -> np.ndarray:
    """The ids that alone may follow, one after another."""
    sequence = asked.sequence
    # A step that was broken off may have read guesses.
    place.rewind(sequence.visible)
    line, found = table.data[sequence.line, : sequence.visible], list[int]()
    while len(found) < asked.most:
        words = place.mask(line, len(line))
        only = None if words is None else tokens_in(words, 1)
        # An end is chosen like any token: nothing comes after it that could be won.
        if only is None or len(only) != 1 or int(only[0]) in place.ends:
            break
        found.append(int(only[0]))
        line = np.append(line, only)
    return np.array(found, dtype=np.int64)


def _place(sequence: Sequence) -> GrammarPlace:
    """Return the place of the sequence in the grammar of its request."""
    grammar = next(p for p in sequence.request.processors if isinstance(p, GrammarMask))
    return grammar.place(sequence)


def _allowed(
    place: GrammarPlace, sequence: Sequence, guess: np.ndarray, table: TokenTable
) -> np.ndarray:
    """The guess up to the first id that the grammar does not allow."""
    line = table.data[sequence.line, : sequence.visible]
    for count, token in enumerate(guess.tolist()):
        words = place.mask(line, len(line))
        if words is None or not has(words, token):
            return guess[:count]
        line = np.append(line, token)
    return guess
