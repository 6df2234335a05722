"""What processors remember of a prefix, so that a step costs what is new and not what is long.

A memory is a cache of the ids: it may be dropped at any time and is made again from them. It holds
a part that its copies share and that never changes, and the few ids that came since, so that a fork
costs those few (and one plain copy of a table of numbers); it can be rewound to any earlier length.
"""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple, TypeVar

import numpy as np

from everystep.processors.base import remembers
from everystep.types import Rows

_KEPT = 32  # ids at the end that are never shared, so that drafts can be taken back
_ROOM = 96  # further ones before they are


class _Memory:
    """Base of both kinds: the shared part, the ids since, and what `_add` makes of those.

    A shared part has a `length`, and `after(ids)`, the same of a prefix that is longer.
    """

    __slots__ = ("_nothing", "_recent", "_room", "_shared", "start")

    def __init__(self, nothing: Any, start: int = 0) -> None:
        self.start = start
        self._nothing = nothing  # the shared part of no ids
        self._anew(nothing)

    def _anew(self, shared: Any) -> None:
        """Begin with nothing after the shared part."""
        self._shared = shared
        self._recent: list[int] = []
        self._room = _KEPT + max(_ROOM, 4 * isqrt(shared.length))

    def _add(self, token: int) -> None:
        raise NotImplementedError

    def _take_back(self) -> None:
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The number of ids that it covers, those before `start` included."""
        return self.start + self._shared.length + len(self._recent)

    def read(self, line: np.ndarray, length: int) -> None:
        """Bring it to the first `length` ids of the line, which begins with the ids it has read."""
        known = self.length
        if length == known + 1 and len(self._recent) < self._room:  # as in nearly every step
            self._add(int(line[known]))
            return
        self.rewind(length)
        known = self.length
        if known < length:
            self.extend(line[known:length].tolist())

    def extend(self, ids: list[int]) -> None:
        """Extend the prefix by these ids."""
        if len(self._recent) + len(ids) > self._room:
            every = self._recent + ids
            self._anew(self._shared.after(every[:-_KEPT]))
            ids = every[-_KEPT:]
        for token in ids:
            self._add(token)

    def rewind(self, length: int) -> None:
        """Rewind it to at most the first `length` ids; to none where that is far back."""
        excess = self.length - max(length, self.start)
        if excess > len(self._recent):
            self._anew(self._nothing)
            return
        for _ in range(excess):
            self._take_back()


class _Counted(NamedTuple):
    """`tokens` (n,) rising, `counts` (n,), and the place of each token."""

    length: int
    tokens: np.ndarray
    counts: np.ndarray
    place: dict[int, int]

    def after(self, ids: list[int]) -> _Counted:
        added, times = np.unique(np.array(ids, dtype=np.int64), return_counts=True)
        tokens, place = np.unique(np.concatenate([self.tokens, added]), return_inverse=True)
        counts = np.zeros(len(tokens), dtype=np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, times]))
        places = dict(zip(tokens.tolist(), range(len(tokens)), strict=True))
        return _Counted(self.length + len(ids), tokens, counts, places)


_NO_IDS = np.empty(0, dtype=np.int64)
_NOTHING = _Counted(0, _NO_IDS, _NO_IDS, {})


class Occurrences(_Memory):
    """The ids of a prefix from place `start` on, and how often each occurs there.

    Most are sorted, so that looking their scores up goes through memory in one direction.
    """

    __slots__ = ("_highest", "_new", "_table", "_times")

    def __init__(self, start: int = 0) -> None:
        super().__init__(_NOTHING, start)

    def _anew(self, shared: _Counted) -> None:
        super()._anew(shared)
        self._new: dict[int, int] = {}  # places of ids that are not in the shared part
        self._times: dict[int, int] = {}  # how often ids stand after it
        self._table: np.ndarray | None = None  # (2, room) ids and counts, made when asked for
        self._highest = int(shared.tokens[-1]) if len(shared.tokens) else -1

    def _place(self, token: int) -> int:
        place = self._shared.place.get(token)
        return self._new[token] if place is None else place

    def _add(self, token: int) -> None:
        self._recent.append(token)
        self._times[token] = self._times.get(token, 0) + 1
        if token not in self._shared.place and token not in self._new:
            place = self._new[token] = len(self._shared.tokens) + len(self._new)
            self._highest = max(self._highest, token)
            if self._table is not None:
                self._table[:, place] = token, 1
        elif self._table is not None:
            self._table[1, self._place(token)] += 1

    def _take_back(self) -> None:
        token = self._recent.pop()
        if self._table is not None:
            self._table[1, self._place(token)] -= 1
        self._times[token] -= 1
        if not self._times[token]:
            del self._times[token]
            self._new.pop(token, None)  # if present, it was added last

    def _listed(self) -> np.ndarray:
        """Return (2, n) ids and counts."""
        known, count = len(self._shared.tokens), len(self._shared.tokens) + len(self._new)
        if self._table is None:
            self._table = np.zeros((2, known + self._room), dtype=np.int64)
            self._table[:, :known] = self._shared.tokens, self._shared.counts
            self._table[0, known:count] = [*self._new]
            for token, times in self._times.items():
                self._table[1, self._place(token)] += times
        return self._table[:, :count]

    @property
    def tokens(self) -> np.ndarray:
        """(n,) each id once; a view."""
        return self._listed()[0]

    def below(self, size: int) -> np.ndarray:
        """Return (n,) those of `tokens` that are below `size`."""
        tokens = self.tokens
        return tokens if self._highest < size else tokens[tokens < size]

    @property
    def counts(self) -> np.ndarray:
        """(n,) how often each of `tokens` occurs; a view."""
        return self._listed()[1]

    def copy(self) -> Occurrences:
        """Return one that knows the same; what changes is not shared."""
        other = Occurrences(self.start)
        other._shared, other._highest, other._room = self._shared, self._highest, self._room
        other._recent = self._recent.copy()
        other._new, other._times = self._new.copy(), self._times.copy()
        other._table = None if self._table is None else self._table.copy()
        return other


Following = dict[tuple[int, ...], tuple[int, ...]]


class _Grams(NamedTuple):
    """The ids that follow each head of `size` - 1 ids, and the last ids."""

    size: int
    length: int
    following: Following
    tail: tuple[int, ...]

    def after(self, ids: list[int]) -> _Grams:
        following, known = self.following.copy(), [*self.tail, *ids]
        for end in range(self.size - 1, len(known)):
            head = tuple(known[end - self.size + 1 : end])
            before = following.get(head, ())
            if known[end] not in before:
                following[head] = (*before, known[end])
        tail = tuple(known[max(len(known) - self.size + 1, 0) :])
        return _Grams(self.size, self.length + len(ids), following, tail)


class NGrams(_Memory):
    """The ids that follow each `size - 1` ids in a prefix."""

    __slots__ = ("_following", "_news", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(_Grams(size, 0, {}, ()))

    def _anew(self, shared: _Grams) -> None:
        super()._anew(shared)
        self._following: Following = {}  # of heads that more follows than in the shared part
        self._news: list[bool] = []  # per id, whether it ended an n-gram for the first time

    def following(self, head: tuple[int, ...]) -> tuple[int, ...]:
        """Return each id that follows the given `size - 1` ids somewhere, once."""
        found = self._following.get(head)
        return self._shared.following.get(head, ()) if found is None else found

    def next(self) -> tuple[int, ...]:
        """Return each id that would complete an n-gram of the prefix."""
        return self.following(self._head())

    def _head(self) -> tuple[int, ...]:
        """Return the last `size` - 1 ids, or all."""
        before, own = self.size - 1, self._recent
        if len(own) < before:
            own = [*self._shared.tail, *own]
        return tuple(own[max(len(own) - before, 0) :])

    def _add(self, token: int) -> None:
        head = self._head()
        known = self.following(head)
        new = len(head) == self.size - 1 and token not in known
        if new:
            self._following[head] = (*known, token)
        self._recent.append(token)
        self._news.append(new)

    def _take_back(self) -> None:
        self._recent.pop()
        if self._news.pop():
            head = self._head()
            self._following[head] = self._following[head][:-1]

    def copy(self) -> NGrams:
        """Return one that knows the same; what changes is not shared."""
        other = NGrams(self.size)
        other._shared, other._room = self._shared, self._room
        other._recent = self._recent.copy()
        other._following, other._news = self._following.copy(), self._news.copy()
        return other


M = TypeVar("M", Occurrences, NGrams)


def remembered(rows: Rows, r: int, kind: type[M], parameter: int) -> M:
    """Return what is remembered of all of row r's prefix.

    Its sequence remembers it; of ids that are given by hand it is read just now. `parameter`: what
    a memory of that kind is made with.
    """
    sequence, key = rows.sequences[r], f"{kind.__name__} {parameter}"
    memo = sequence.memo if remembers(rows) else {}
    memory: M | None = memo.get(key)
    if memory is None:
        memory = memo[key] = kind(parameter)
    memory.read(rows.table.data[sequence.line], int(rows.lengths[r]))
    return memory
