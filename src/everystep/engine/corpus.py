"""Drafts that are copied from texts that were read before: how they go on where they say the same.

The texts lie in one line of ids, and beside it the order of all its suffixes, so that every place
where some ids stand is found by halving.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from everystep.engine.feed import NO_IDS
from everystep.engine.lookup import PromptLookup, before, read
from everystep.errors import RequestError, shown
from everystep.types import Draft, TokenTable
from everystep.types.protocols import Schedule
from everystep.types.request import WantedDraft

_END = -1  # after every text
_LEAST = 2  # ids that must stand in the corpus
_LOOKED_AT = 64  # places, at most, from which the likeliest next id is taken


class Corpus:
    """Texts to copy drafts from: texts, which the tokenizer encodes, or lists of ids.

    Takes 16 bytes per id. May be shared by any number of calls.
    """

    def __init__(self, texts: Iterable[str | Sequence[int]], tokenizer: Any = None) -> None:
        several = hasattr(texts, "__iter__") and getattr(texts, "ndim", 1) > 0
        if not several or isinstance(texts, str | bytes):
            wanted, do = "a list of texts or of lists of ids", "Put a single one in a list"
            raise RequestError("these are no texts", wanted=wanted, got=shown(texts), do=do)
        lines = [np.append(_read(text, tokenizer), _END) for text in texts]
        self.ids = np.concatenate(lines) if lines else NO_IDS
        self._order = suffix_order(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def follow(
        self, tail: np.ndarray, longest: int, most: int, rank: int = 0
    ) -> tuple[int, np.ndarray]:
        """Count the last ids of `tail`, at most `longest`, that stand in the corpus, and return up
        to `most` ids that come next there.

        Each of them is the one that is seen most often, the first of them the one that `rank`
        others are seen more often than.
        """
        size, place = self._longest(tail, longest)
        found: list[int] = []
        while size and len(found) < most:
            depth = size + len(found)
            looked = np.linspace(place[0], place[1] - 1, min(place[1] - place[0], _LOOKED_AT))
            behind = self._order[looked.astype(np.int64)] + depth
            tokens, counts = np.unique(self.ids[behind], return_counts=True)
            often = np.argsort(-np.where(tokens == _END, 0, counts), kind="stable")
            choice = 0 if found else rank
            if choice >= len(often) or (token := int(tokens[often[choice]])) == _END:
                break
            found.append(token)
            place = self._narrowed(place, depth, token)
        return size, np.array(found, dtype=np.int64)

    def _longest(self, tail: np.ndarray, longest: int) -> tuple[int, tuple[int, int]]:
        """The longest end of `tail` that the corpus holds, and where in the order it stands."""
        low, high, where = 0, min(longest, len(tail)), (0, 0)
        while low < high:  # what holds some ids holds the end of them
            size = (low + high + 1) // 2
            place = self._places(tail[len(tail) - size :])
            if place[0] < place[1]:
                low, where = size, place
            else:
                high = size - 1
        return low, where

    def _places(self, ids: np.ndarray) -> tuple[int, int]:
        """Find the range of suffixes, in their order, that begin with these ids."""
        place = 0, len(self._order)
        for depth, token in enumerate(ids.tolist()):
            if place[0] == place[1]:
                break
            place = self._narrowed(place, depth, token)
        return place

    def _narrowed(self, place: tuple[int, int], depth: int, token: int) -> tuple[int, int]:
        """Narrow the range to suffixes that go on with this id after `depth` others."""
        order, ids, last = self._order, self.ids, len(self.ids) - 1

        def key(index: int) -> int:
            at = int(order[index]) + depth
            return int(ids[at]) if at <= last else _END

        every = range(len(order))
        first = bisect_left(every, token, *place, key=key)
        return first, bisect_right(every, token, first, place[1], key=key)


def suffix_order(ids: np.ndarray) -> np.ndarray:
    """(n,) ids -> where the suffixes begin, in their order. Source: Manber & Myers 1993."""
    rank, step = ids.astype(np.int64), 1
    order = np.argsort(rank, kind="stable")
    while len(ids):
        behind = np.full(len(ids), _END - 1, dtype=np.int64)
        behind[:-step] = rank[step:]
        order = np.lexsort((behind, rank))
        first, second = rank[order], behind[order]
        differs = (np.diff(first) != 0) | (np.diff(second) != 0)
        rank = np.empty(len(ids), dtype=np.int64)
        rank[order] = np.concatenate([[0], differs.cumsum()])
        if differs.all() or step >= len(ids):
            break
        step *= 2
    return order


@dataclass(frozen=True)
class CorpusLookup:
    """A drafter that copies what followed the latest ids in a corpus, at least two of them.

    Tries up to `max_ngram` ids; drafts `tokens` ids where there are so many, none at or after an id
    of `stop_ids`. `prompt`: looks into the sequence itself where the corpus knows fewer ids.
    `alternatives` begin with the ids that were seen less often.
    Source: Hu et al. 2024 (SAM decoding).
    """

    corpus: Corpus
    tokens: int = 10
    max_ngram: int = 16
    stop_ids: tuple[int, ...] = ()
    schedule: Schedule = "constant"
    prompt: PromptLookup | None = None
    alternatives: int = 0

    def start(self, vocabulary: int) -> CorpusLookup:
        return self

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        return [Draft(self.draft(read(s, table), most, rank)) for s, most, rank in asked]

    def draft(self, ids: np.ndarray, most: int, rank: int = 0) -> np.ndarray:
        """Visible ids of one sequence -> at most so many guessed next ids, by the `rank` of the
        first."""
        known, guess = self.corpus.follow(ids, self.max_ngram, most, rank)
        if self.prompt is not None and known <= self.prompt.max_ngram:
            own = self.prompt.draft(ids, most, rank)
            if len(own):
                return own
        return before(guess, self.stop_ids) if known >= _LEAST else NO_IDS

    def restart(self) -> None:
        """There is nothing to drop."""

    def held(self) -> int:
        return 0


def _read(text: str | Sequence[int], tokenizer: Any) -> np.ndarray:
    """(n,) the ids of a text; RequestError for what is neither text nor ids."""
    if isinstance(text, str):
        if tokenizer is None:
            raise RequestError("texts of a corpus need a tokenizer", do="Pass it, or lists of ids")
        text = tokenizer.encode(text, add_special_tokens=False)
    try:
        ids = np.asarray(text, dtype=None if len(text) else np.int64).reshape(-1)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        ids = np.array([-1])
    if ids.dtype.kind not in "iu" or (ids < 0).any():
        raise RequestError("this is no text", wanted="a text or ids", got=shown(text)[:60])
    return ids.astype(np.int64)
