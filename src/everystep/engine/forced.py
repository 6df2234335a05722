"""Drafts that a grammar forces: where one token alone may follow, it needs no logits to be known.

Such a draft cannot be rejected, since its rivals are all -inf. Where nothing is forced, another
drafter may guess, as far as the grammar allows what it guesses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from everystep.processors.grammars.grammar import GrammarPlace, has, tokens_in
from everystep.processors.grammars.mask import GrammarMask
from everystep.types import Sequence, TokenTable
from everystep.types.protocols import Drafter, Drafting

_MOST = 32


@dataclass(frozen=True)
class ForcedTokens:
    """The tokens that a request's grammar forces, up to `most` at a time; where it forces none,
    what `beside` guesses."""

    beside: Drafter | None = None
    most: int = _MOST

    def start(self, vocabulary: int) -> Drafting:
        beside = None if self.beside is None else self.beside.start(vocabulary)
        return _Forcing(self.most, beside)


@dataclass(slots=True)
class _Forcing:
    """At work for an engine."""

    most: int
    beside: Drafting | None = field(default=None)

    def propose(self, sequences: list[Sequence], table: TokenTable) -> list[np.ndarray]:
        places = [_place(sequence) for sequence in sequences]
        found = [
            self._forced(place, sequence, table)
            for place, sequence in zip(places, sequences, strict=True)
        ]
        free = [s for s, draft in enumerate(found) if not len(draft)]
        if self.beside is not None and free:
            guesses = self.beside.propose([sequences[s] for s in free], table)
            for s, guess in zip(free, guesses, strict=True):
                found[s] = _allowed(places[s], sequences[s], guess, table)
        return found

    def _forced(self, place: GrammarPlace, sequence: Sequence, table: TokenTable) -> np.ndarray:
        """The ids that alone may follow, one after another."""
        # A step that was broken off may have read guesses.
        place.rewind(sequence.visible)
        line, found = table.data[sequence.line, : sequence.visible], list[int]()
        while len(found) < self.most:
            words = place.mask(line, len(line))
            only = None if words is None else tokens_in(words, 1)
            # An end is chosen like any token: nothing comes after it that could be won.
            if only is None or len(only) != 1 or int(only[0]) in place.ends:
                break
            found.append(int(only[0]))
            line = np.append(line, only)
        return np.array(found, dtype=np.int64)

    def restart(self) -> None:
        if self.beside is not None:
            self.beside.restart()

    def held(self) -> int:
        return 0 if self.beside is None else self.beside.held()


def _place(sequence: Sequence) -> GrammarPlace:
    """Where the sequence stands in the grammar of its request."""
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
