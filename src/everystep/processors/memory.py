"""What processors remember of a prefix, so that a step costs what is new and not what is long.

Both kinds read the ids that were added since the last look, can be rewound to any earlier length,
and copy without sharing anything that changes; a fork or a truncation keeps them true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from everystep.types import Rows

_FEW = 32  # ids that are added one by one


class Occurrences:
    """The ids of a prefix from place `start` on, and how often each stands there.

    They are sorted whenever many have been read, so that who looks their scores up goes through
    memory in one direction; what comes behind is in the order of its first occurrence.
    """

    __slots__ = ("_counts", "_highest", "_ids", "_place", "_sorted", "_tokens", "start")

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._highest = -1  # no id was ever higher
        self._ids: list[int] = []
        self._sort()

    @property
    def tokens(self) -> np.ndarray:
        """(n,) each id once; a view."""
        return self._tokens[: len(self._place)]

    def below(self, size: int) -> np.ndarray:
        """(n,) those of `tokens` that are below `size`."""
        tokens = self.tokens
        return tokens if self._highest < size else tokens[tokens < size]

    @property
    def counts(self) -> np.ndarray:
        """(n,) how often each of `tokens` stands; a view."""
        return self._counts[: len(self._place)]

    def read(self, line: np.ndarray, length: int) -> None:
        """It speaks of the first `length` ids of the line."""
        known = self.start + len(self._ids)
        if length < known:
            self.rewind(length)
        elif length == known + 1:  # as in nearly every step
            self._add(int(line[known]))
        else:
            self.extend(line[known:length].tolist())

    def extend(self, ids: list[int]) -> None:
        """The prefix is longer by these ids."""
        if len(ids) > _FEW:
            self._ids += ids
            self._sort()
            return
        for token in ids:
            self._add(token)

    def _add(self, token: int) -> None:
        self._ids.append(token)
        place = self._place.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = len(self._place)
        if place == len(self._tokens):
            self._sort()
            return
        self._place[token] = place
        self._tokens[place], self._counts[place] = token, 1
        self._highest = max(self._highest, token)

    def _sort(self) -> None:
        """All anew, with room for as many again; views that were given keep what they show."""
        tokens, counts = np.unique(np.array(self._ids, dtype=np.int64), return_counts=True)
        self._tokens, self._counts = (np.resize(x, 2 * len(x) + _FEW) for x in (tokens, counts))
        self._place = dict(zip(tokens.tolist(), range(len(tokens)), strict=True))
        self._highest = int(tokens[-1]) if len(tokens) else -1
        self._sorted = len(self._ids)

    def rewind(self, length: int) -> None:
        """As it was when the prefix had `length` ids."""
        kept = max(length - self.start, 0)
        if kept < self._sorted:
            del self._ids[kept:]
            self._sort()
        while len(self._ids) > kept:
            token = self._ids.pop()
            place = self._place[token]
            self._counts[place] -= 1
            # Backwards, the id that is gone is the one that came last of all distinct ones.
            if self._counts[place] == 0:
                del self._place[token]

    def copy(self) -> Occurrences:
        """One that knows the same and shares nothing."""
        other = Occurrences(self.start)
        other._highest, other._sorted = self._highest, self._sorted
        other._ids = self._ids.copy()
        other._place = self._place.copy()
        other._tokens = self._tokens.copy()
        other._counts = self._counts.copy()
        return other


class NGrams:
    """Which ids follow which `size - 1` ids in a prefix."""

    __slots__ = ("_following", "_ids", "_news", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._ids: list[int] = []
        self._following: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._news: list[bool] = []  # per id, whether it ended an n-gram for the first time

    def following(self, head: tuple[int, ...]) -> tuple[int, ...]:
        """Each id that follows the given `size - 1` ids somewhere, once."""
        return self._following.get(head, ())

    def next(self) -> tuple[int, ...]:
        """Each id that would complete an n-gram of the prefix."""
        return self.following(self._head())

    def _head(self) -> tuple[int, ...]:
        return tuple(self._ids[len(self._ids) - self.size + 1 :])

    def read(self, line: np.ndarray, length: int) -> None:
        """It speaks of the first `length` ids of the line."""
        self.rewind(length)
        self.extend(line[len(self._ids) : length].tolist())

    def extend(self, ids: Iterable[int]) -> None:
        """The prefix is longer by these ids."""
        for token in ids:
            new = False
            if len(self._ids) >= self.size - 1:
                head = self._head()
                known = self._following.get(head, ())
                new = token not in known
                if new:
                    self._following[head] = (*known, token)
            self._ids.append(token)
            self._news.append(new)

    def rewind(self, length: int) -> None:
        """As it was when the prefix had `length` ids."""
        while len(self._ids) > length:
            self._ids.pop()
            if self._news.pop():
                head = self._head()
                self._following[head] = self._following[head][:-1]

    def copy(self) -> NGrams:
        """One that knows the same and shares nothing that changes."""
        other = NGrams(self.size)
        other._ids = self._ids.copy()
        other._following = self._following.copy()
        other._news = self._news.copy()
        return other


def occurrences(rows: Rows, r: int, start: int) -> Occurrences:
    """What row r's sequence remembers of the ids of its prefix from `start` on."""
    return _read(rows, r, f"occurrences from {start}", lambda: Occurrences(start))


def ngrams(rows: Rows, r: int, size: int) -> NGrams:
    """What row r's sequence remembers of the n-grams of its prefix."""
    return _read(rows, r, f"{size}-grams", lambda: NGrams(size))


M = TypeVar("M", Occurrences, NGrams)


def _read(rows: Rows, r: int, key: str, make: Callable[[], M]) -> M:
    """The memory of row r's sequence under a key, which has read all of the prefix."""
    sequence = rows.sequences[r]
    if key not in sequence.memo:
        sequence.memo[key] = make()
    memory: M = sequence.memo[key]
    memory.read(rows.table.data[sequence.line], int(rows.lengths[r]))
    return memory
