"""What must occur in a text: constraints that are fulfilled token by token.

A `Constraint` keeps how far it is, and is asked which tokens bring it further. Those of a caller's
own derive from it. Names and methods are those of transformers until 4.55.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from everystep.config.kinds import is_integer, is_list
from everystep.errors import RequestError, shown

_MOST_STEPS = 10_000


def _require_ids(value: Any, name: str) -> None:
    if not is_list(value, lambda one: is_integer(one) and one >= 0, least=1):
        raise RequestError(
            f"{name} holds no word",
            wanted="a non-empty list of token ids",
            got=shown(value),
            do="Pass the ids of a word, without special tokens",
        )


class Constraint(ABC):
    """Something that must occur. `seqlen`: the most tokens that it takes.

    A subclass that calls `super().__init__()` last is tested: following `advance` has to fulfil it.
    """

    seqlen: int
    completed: bool = False

    def __init__(self) -> None:
        self.test()

    def __repr__(self) -> str:
        # A saved generation knows its constraints by this, so it must not change.
        return f"{type(self).__qualname__}()"

    def test(self) -> None:
        """Raise RequestError unless following `advance` fulfils it, from its beginning."""
        self.reset()
        for _ in range(_MOST_STEPS):
            ahead = self.advance()
            token = ahead[0] if isinstance(ahead, list) and ahead else ahead
            if not isinstance(token, int) or not self.does_advance(token):
                break
            if self.update(token)[1]:
                if self.remaining() == 0:
                    self.reset()
                    return
                break
        raise RequestError(
            f"{type(self).__name__} contradicts itself",
            wanted="advance() to name tokens that does_advance() and update() take, and after the "
            "last of them remaining() to be 0",
            do="Correct its methods",
        )

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """Return the token or the tokens that bring it further; None where none does."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Return whether the token brings it further."""

    @abstractmethod
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Read a token; return whether it brought it further, fulfilled it, or threw it back."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the beginning."""

    @abstractmethod
    def remaining(self) -> int:
        """Return how many tokens it still takes."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """Return the same constraint at its beginning, or, `stateful`, as far as this one is."""


class DisjunctiveConstraint(Constraint):
    """One of several words has to occur, each a list of ids; none may begin another."""

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        if not isinstance(nested_token_ids, list | tuple) or not nested_token_ids:
            got = shown(nested_token_ids)
            what = "DisjunctiveConstraint needs words"
            raise RequestError(what, wanted="a non-empty list of lists of ids", got=got)
        for word in nested_token_ids:
            _require_ids(word, "a constraint")
        self.token_ids = [[int(token) for token in word] for word in nested_token_ids]
        self.seqlen = max(map(len, self.token_ids))
        self._trie = _trie(self.token_ids)
        self._read: tuple[int, ...] = ()
        self.completed = False

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({self.token_ids})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _next(self) -> list[int]:
        level = self._trie
        for token in self._read:
            level = level[token]
        return [*level]

    def advance(self) -> list[int] | None:
        """Return the tokens with which a word goes on."""
        return self._next() or None

    def does_advance(self, token_id: int) -> bool:
        """Return whether a word goes on with the token."""
        return token_id in self._next()

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Go one token further in a word, or back to the beginning."""
        stepped = self.does_advance(token_id)
        if stepped:
            self._read = (*self._read, token_id)
        else:
            self.reset()
        self.completed = stepped and not self._next()
        return stepped, self.completed, not stepped

    def reset(self) -> None:
        """Forget the tokens of a word that were read."""
        self._read, self.completed = (), False

    def remaining(self) -> int:
        """Return how many tokens the longest word would still take; 0 after a word."""
        return 0 if self.completed else self.seqlen - len(self._read)

    def copy(self, stateful: bool = False) -> DisjunctiveConstraint:
        """Return the same words."""
        other: DisjunctiveConstraint = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        if not stateful:
            other.reset()
        return other


class PhrasalConstraint(DisjunctiveConstraint):
    """One word has to occur: these ids, one after another."""

    def __init__(self, token_ids: list[int]) -> None:
        _require_ids(token_ids, "PhrasalConstraint")
        super().__init__([token_ids])
        self.token_ids: Any = [int(token) for token in token_ids]

    def advance(self) -> Any:
        """Return the token with which the word goes on."""
        ahead = self._next()
        return ahead[0] if ahead else None


def _trie(words: list[list[int]]) -> dict[int, Any]:
    """Return the words as nested dicts.

    Raise RequestError where one begins another, or is repeated.
    """
    root: dict[int, Any] = {}
    ends = []
    for word in words:
        level = root
        for token in word:
            level = level.setdefault(token, {})
        ends.append(level)
    if any(ends) or len({id(end) for end in ends}) < len(words):
        raise RequestError(
            "one word of a DisjunctiveConstraint begins another",
            wanted="words of which none is the beginning of another",
            got=shown(words),
            do="Leave the longer one out: where it occurs, the shorter one does",
        )
    return root
