"""An executor that is stricter than any machine: rows of the hash function's states.

Each row keeps its own list of everything that was fed into it. Logits come only from positions fed
in that very call, and whatever real storage would forgive or corrupt silently (a feed at the wrong
place, a row used after it was freed, a fork onto a live row) is an `InvariantError` here. What it
was asked to do is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError, message
from everystep.testing.hash_function import HashFunction
from everystep.types import StepOutput, Verb, Work

ABILITIES = frozenset(
    {"truncate", "embeds", "positions", "columns", "layers", "attentions", "encoder"}
)
LAYERS = 2
HEADS = 2


@dataclass(slots=True)
class Counts:
    """What an executor was asked to do so far.

    `chunk_feeds`: feeds that wanted no logits. `copied`: positions that forks carried over.
    """

    forwards: int = 0
    tokens: int = 0
    chunk_feeds: int = 0
    allocations: int = 0
    forks: int = 0
    copied: int = 0
    truncates: int = 0
    frees: int = 0


@dataclass(slots=True)
class Row:
    """One cache row: per position the key of its input and the state after it."""

    start: int
    columns: bool
    keys: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def copy(self) -> Row:
        """An equal row that shares nothing with this one."""
        return Row(self.start, self.columns, list(self.keys), list(self.states))


@dataclass(frozen=True, slots=True)
class Feed:
    """One feed of a work: its place among the N inputs, its row, and what it wants."""

    offset: int
    row: int
    start: int
    count: int
    logits: int


class HashExecutor:
    """Runs works on the hash function; every misuse is an `InvariantError`."""

    device = torch.device("cpu")
    host_threads: int | None = None

    def __init__(
        self,
        vocab_size: int,
        embed_dim: int = 4,
        *,
        max_rows: int | None = None,
        abilities: frozenset[str] = ABILITIES,
    ) -> None:
        self.function = HashFunction(vocab_size, embed_dim)
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.abilities = abilities
        self.counts = Counts()
        self.rows: dict[int, Row] = {}

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want."""
        for verb in work.verbs:
            self._apply(verb, work)
        feeds = self._feeds(work)
        self._check_inputs(work)
        keys, positions = self._keys(work), self._positions(work, feeds)
        for feed in feeds:
            span = slice(feed.offset, feed.offset + feed.count)
            self._feed(feed, keys[span], positions[span])
        self._count(feeds)
        return self._output(work, feeds)

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        return {number: len(row.states) for number, row in self.rows.items()}

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, verb: Verb, work: Work) -> None:
        if verb.kind == "allocate":
            self._open(verb.row, self._fresh_row(verb.row, work))
            self.counts.allocations += 1
        elif verb.kind == "fork":
            source = self._live(verb.value, "fork from")
            self._open(verb.row, source.copy())
            self.counts.forks += 1
            self.counts.copied += len(source.states)
        elif verb.kind == "truncate":
            self._truncate(self._live(verb.row, "truncate"), verb)
        else:
            self._live(verb.row, "free")
            del self.rows[verb.row]
            self.counts.frees += 1

    def _fresh_row(self, number: int, work: Work) -> Row:
        encoder = work.encoders.get(number)
        _require(encoder is None or "encoder" in self.abilities, "encoder states were given")
        _require(number not in work.columns or "columns" in self.abilities, "columns were wanted")
        return Row(self.function.start(encoder), number in work.columns)

    def _open(self, number: int, row: Row) -> None:
        _require(number not in self.rows, f"row {number} was opened while it was live")
        full = self.max_rows is not None and len(self.rows) >= self.max_rows
        _require(not full, f"row {number} was opened beyond the {self.max_rows} that fit")
        self.rows[number] = row

    def _truncate(self, row: Row, verb: Verb) -> None:
        _require("truncate" in self.abilities, f"row {verb.row} was truncated")
        held = len(row.states)
        _require(0 <= verb.value <= held, f"row {verb.row} was cut to {verb.value} of {held}")
        del row.states[verb.value :], row.keys[verb.value :]
        self.counts.truncates += 1

    def _live(self, number: int, purpose: str) -> Row:
        row = self.rows.get(number)
        if row is None:
            raise InvariantError(message(f"a row to {purpose} is not allocated", got=number))
        return row

    # --- inputs -----------------------------------------------------------------------------------

    def _feeds(self, work: Work) -> list[Feed]:
        lengths = {len(work.rows), len(work.starts), len(work.counts), len(work.logits)}
        _require(len(lengths) == 1, f"the arrays of the feeds have lengths {lengths}")
        offsets = np.concatenate([[0], np.cumsum(work.counts)]).tolist()
        _require(offsets[-1] == len(work.tokens), "the counts of the feeds miss the inputs")
        columns = (work.rows, work.starts, work.counts, work.logits)
        feeds = list(map(Feed, offsets[:-1], *(column.tolist() for column in columns)))
        fed = [feed.row for feed in feeds]
        _require(len(set(fed)) == len(fed), f"a row was fed twice in one work: {fed}")
        return feeds

    def _check_inputs(self, work: Work) -> None:
        given = np.zeros(len(work.tokens), dtype=bool)
        for offset, embeds in work.embeds:
            _require("embeds" in self.abilities, "embeddings were fed")
            _require(tuple(embeds.shape[1:]) == (self.function.embed_dim,), "an embedding's width")
            _require(not given[offset : offset + len(embeds)].any(), "embeddings overlap")
            given[offset : offset + len(embeds)] = True
        inside = (work.tokens >= 0) & (work.tokens < self.vocab_size)
        fits = np.where(given, work.tokens == -1, inside)
        _require(bool(fits.all()), f"inputs are neither ids nor embeddings: {work.tokens[~fits]}")

    def _keys(self, work: Work) -> list[int]:
        keys = [self.function.token_key(token) for token in work.tokens.tolist()]
        for offset, embeds in work.embeds:
            keys[offset : offset + len(embeds)] = self.function.keys(embeds)
        return keys

    def _positions(self, work: Work, feeds: list[Feed]) -> list[tuple[int, ...]]:
        if work.positions is None:
            return [(feed.start + i,) for feed in feeds for i in range(feed.count)]
        _require("positions" in self.abilities, "position ids were fed")
        given = work.positions.reshape(-1, work.positions.shape[-1]).T.tolist()
        _require(len(given) == len(work.tokens), "there is not one position id per input")
        return [tuple(int(coordinate) for coordinate in place) for place in given]

    def _feed(self, feed: Feed, keys: list[int], positions: list[tuple[int, ...]]) -> None:
        row = self._live(feed.row, "feed")
        held = len(row.states)
        _require(feed.count > 0, f"row {feed.row} was fed nothing")
        _require(feed.start == held, f"row {feed.row} was fed at {feed.start} with {held} cached")
        _require(0 <= feed.logits <= feed.count, f"row {feed.row} wants logits of unfed positions")
        state = row.states[-1] if row.states else row.start
        for key, position in zip(keys, positions, strict=True):
            state = self.function.advance(state, key, position)
            row.states.append(state)
        row.keys += keys

    def _count(self, feeds: list[Feed]) -> None:
        self.counts.forwards += bool(feeds)
        self.counts.tokens += sum(feed.count for feed in feeds)
        self.counts.chunk_feeds += sum(feed.logits == 0 for feed in feeds)

    # --- outputs ----------------------------------------------------------------------------------

    def _output(self, work: Work, feeds: list[Feed]) -> StepOutput:
        states: list[int] = []
        pairs: list[tuple[int, int]] = []
        for feed in feeds:
            row = self.rows[feed.row]
            wanted = range(feed.start + feed.count - feed.logits, feed.start + feed.count)
            states += [row.states[p] for p in wanted]
            pairs += [(row.keys[p - 1] if p else 0, row.keys[p]) for p in wanted]
        logits = self.function.logits(_uint64(states), _uint64(pairs).reshape(-1, 2))
        columns = {
            feed.row: self.function.hidden(_uint64(self.rows[feed.row].states))
            for feed in feeds
            if self.rows[feed.row].columns
        }
        layers = self._layers(feeds) if work.layers else None
        attentions = tuple(self._attentions(feeds)) if work.attentions else None
        return StepOutput(logits, columns, layers, attentions)

    def _layers(self, feeds: list[Feed]) -> tuple[Tensor, ...]:
        _require("layers" in self.abilities, "layers were wanted")
        fed = _uint64([state for f in feeds for state in self.rows[f.row].states[f.start :]])
        return tuple(self.function.hidden(fed, layer) for layer in range(LAYERS, -1, -1))

    def _attentions(self, feeds: list[Feed]) -> Iterator[tuple[Tensor, ...]]:
        _require("attentions" in self.abilities, "attentions were wanted")
        for feed in feeds:
            hidden = self.function.hidden(_uint64(self.rows[feed.row].states))
            later = torch.ones(feed.count, len(hidden)).triu(feed.start + 1).bool()
            scores = (hidden[feed.start :] @ hidden.T).masked_fill(later, -torch.inf)
            yield (torch.softmax(scores, dim=-1).expand(HEADS, -1, -1),) * LAYERS


def _uint64(values: list[int] | list[tuple[int, int]]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(message(f"{broken}, which no executor has to survive"))
