"""What the executors of this package share: rows of their own, and no misuse forgiven.

Whatever real storage would forgive or corrupt silently (a feed at the wrong place, a row used after
it was freed, a fork onto a live row) is an `InvariantError` here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError
from everystep.types import Answer, Extra, InputSpec, StepOutput, Verb, Work

_PLAIN = Extra()


@dataclass(slots=True, eq=False)
class Row:
    """One cache row: arrays (length, ...), which are replaced and never written into.

    `start`: the state before the first position, for models that have one.
    """

    parts: list[np.ndarray]
    start: int = 0

    @property
    def length(self) -> int:
        return len(self.parts[0])

    def first(self, length: int) -> Row:
        """A copy of the first `length` positions."""
        return Row([part[:length].copy() for part in self.parts], self.start)


@dataclass(frozen=True, slots=True, eq=False)
class RowFeed:
    """One feed of a work: `tokens` (count,), `positions` (1 or axes, count)."""

    row: int
    start: int
    count: int
    logits: int
    tokens: np.ndarray
    positions: np.ndarray
    extra: Extra


class StrictExecutor(ABC):
    """Runs works row after row; `counts` says how many forwards, tokens and verbs there were.

    `dtype`: that of its logits.
    """

    device = torch.device("cpu")
    dtype = torch.float32
    host_threads: int | None = None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int,
        abilities: frozenset[str],
        inputs: Mapping[str, InputSpec],
        max_rows: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.embed_dim = embed_dim
        self.abilities = abilities
        self.inputs = inputs
        self.max_rows = max_rows
        self.counts: Counter[str] = Counter()
        self.rows: dict[int, Row] = {}

    @abstractmethod
    def empty_row(self, encoder: Tensor | None) -> Row:
        """A row without positions that reads these encoder states, if any."""

    @abstractmethod
    def extend(self, row: Row, feed: RowFeed) -> tuple[Tensor, Answer]:
        """Extends the row by the feed: (wanted, V) logits, and what it wants beyond them."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """(n,) ids -> (n, E) what can be fed in their place."""

    def run(self, work: Work) -> StepOutput:
        feeds = _feeds(work)
        for verb in work.verbs:
            self._apply(verb, work)
        found = [self.extend(self._checked(feed), feed) for feed in feeds]
        self.counts["forwards"] += bool(feeds)
        self.counts["tokens"] += len(work.tokens)
        none = torch.empty(0, self.vocab_size, dtype=self.dtype)
        logits = torch.cat([none, *(logits for logits, _ in found)])
        return StepOutput(logits, {f: found[f][1] for f in work.extras})

    def audit(self) -> dict[int, int]:
        return {number: row.length for number, row in self.rows.items()}

    def _apply(self, verb: Verb, work: Work) -> None:
        self.counts[verb.kind] += 1
        if verb.kind == "allocate":
            encoder = work.encoders.get(verb.row)
            require(encoder is None or "encoder" in self.abilities, "encoder states were given")
            self._open(verb.row, self.empty_row(encoder))
        elif verb.kind == "fork":
            source = self._live(verb.value)
            self._open(verb.row, source.first(source.length))
        elif verb.kind == "truncate":
            row = self._live(verb.row)
            require("truncate" in self.abilities, f"row {verb.row} was truncated")
            fits = 0 <= verb.value <= row.length
            require(fits, f"row {verb.row} of {row.length} positions was cut to {verb.value}")
            self.rows[verb.row] = row.first(verb.value)
        else:
            self._live(verb.row)
            del self.rows[verb.row]

    def _open(self, number: int, row: Row) -> None:
        require(number not in self.rows, f"row {number} was opened while it was live")
        full = self.max_rows is not None and len(self.rows) >= self.max_rows
        require(not full, f"row {number} was opened beyond the {self.max_rows} that fit")
        self.rows[number] = row

    def _live(self, number: int) -> Row:
        require(number in self.rows, f"row {number} was used without being allocated")
        return self.rows[number]

    def _checked(self, feed: RowFeed) -> Row:
        """The row of the feed, which continues it with one input per position."""
        row, held = self._live(feed.row), self.rows[feed.row].length
        require(feed.count > 0, f"row {feed.row} was fed nothing")
        require(feed.start == held, f"row {feed.row} was fed at {feed.start} with {held} cached")
        require(0 <= feed.logits <= feed.count, f"row {feed.row} wants logits of unfed positions")
        missing = _asked(feed.extra) - self.abilities
        require(not missing, f"{', '.join(sorted(missing))}: an executor without them was asked")
        given, ids = np.zeros(feed.count, dtype=bool), feed.tokens
        for name, start, values in feed.extra.inputs:
            stop = start + len(values)
            require(start >= 0 and stop <= feed.count, f"{name} reach beyond the feed")
            if name == "embeds":
                require(tuple(values.shape[1:]) == (self.embed_dim,), "an embedding's width")
                require(not given[start:stop].any(), "embeddings overlap")
                given[start:stop] = True
        fits = np.where(given, ids == -1, (ids >= 0) & (ids < self.vocab_size))
        wrong = ids[~fits].tolist()
        require(not wrong, f"inputs are neither ids nor embeddings: {wrong}")
        if feed.extra.mask is not None:
            wanted = (feed.count, feed.start + feed.count)
            require(tuple(feed.extra.mask.shape[1:]) == wanted, f"a mask is not (heads, *{wanted})")
        return row


def _asked(extra: Extra) -> set[str]:
    """The abilities that a feed needs."""
    brought = [name for name in ("positions", "mask") if getattr(extra, name) is not None]
    wanted = [name for name in ("hidden", "layers", "attentions") if getattr(extra, name)]
    return {*brought, *wanted, *(given.name for given in extra.inputs)}


def _feeds(work: Work) -> list[RowFeed]:
    columns = [x.tolist() for x in (work.rows, work.starts, work.counts, work.logits)]
    lengths = {len(column) for column in columns}
    require(len(lengths) == 1, f"the arrays of the feeds have lengths {sorted(lengths)}")
    require(sum(columns[2]) == len(work.tokens), "the counts of the feeds miss the inputs")
    rows = columns[0]
    require(len(set(rows)) == len(rows), f"a row was fed twice in one work: {rows}")
    require(set(work.extras) <= set(range(len(rows))), "extras belong to no feed")
    feeds = []
    for f, (offset, row, start, count, logits) in enumerate(
        zip(work.offsets.tolist(), *columns, strict=True)
    ):
        extra, positions = work.extras.get(f, _PLAIN), np.arange(start, start + count)[None]
        if (given := extra.positions) is not None:
            require(given.shape[-1] == count, "there is not one position id per input")
            positions = np.atleast_2d(given.cpu().numpy())
        tokens = work.tokens[offset : offset + count]
        feeds.append(RowFeed(row, start, count, logits, tokens, positions, extra))
    return feeds


def require(holds: bool, broken: str) -> None:
    """InvariantError with this text if it does not hold."""
    if not holds:
        raise InvariantError(f"{broken}, which no executor has to survive.")
