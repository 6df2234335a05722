"""An executor that is stricter than any machine: rows of the hash function's states.

Each row keeps its own list of everything that was fed into it. Logits come only from positions fed
in that very call, and whatever real storage would forgive or corrupt silently (a feed at the wrong
place, a row used after it was freed, a fork onto a live row) is an `InvariantError` here. What it
was asked to do is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError, message
from everystep.testing.hash_function import HashFunction
from everystep.types import Answer, Extra, InputSpec, StepOutput, Verb, Work

ABILITIES = frozenset(
    {"truncate", "cut", "embeds", "positions", "mask", "hidden", "layers", "attentions", "encoder"}
)
_PLAIN = Extra()
LAYERS = 2
HEADS = 2


@dataclass(slots=True)
class HashCounts:
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
class HashRow:
    """One cache row: per position the key of its input and the state after it."""

    start: int
    keys: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)

    def copy(self) -> HashRow:
        """An equal row that shares nothing with this one."""
        return HashRow(self.start, list(self.keys), list(self.states))


@dataclass(frozen=True, slots=True)
class HashFeed:
    """One feed of a work: its place among the N inputs, its row, and what it brings and wants."""

    offset: int
    row: int
    start: int
    count: int
    logits: int
    extra: Extra


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
        inputs: tuple[InputSpec, ...] = (),
    ) -> None:
        self.function = HashFunction(vocab_size, embed_dim)
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.inputs: Mapping[str, InputSpec] = {one.name: one for one in inputs}
        self.abilities = abilities | frozenset(self.inputs)
        self.counts = HashCounts()
        self.rows: dict[int, HashRow] = {}

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want."""
        for verb in work.verbs:
            self._apply(verb, work)
        feeds = self._feeds(work)
        for feed in feeds:
            ids = work.tokens[feed.offset : feed.offset + feed.count]
            self._check(feed, ids)
            self._feed(feed, self._keys(feed, ids), self._positions(feed))
        self._count(feeds)
        answers = {f: self._answer(feeds[f]) for f in work.extras}
        return StepOutput(self._logits(feeds), answers)

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

    def _fresh_row(self, number: int, work: Work) -> HashRow:
        encoder = work.encoders.get(number)
        _require(encoder is None or "encoder" in self.abilities, "encoder states were given")
        return HashRow(self.function.start(encoder))

    def _open(self, number: int, row: HashRow) -> None:
        _require(number not in self.rows, f"row {number} was opened while it was live")
        full = self.max_rows is not None and len(self.rows) >= self.max_rows
        _require(not full, f"row {number} was opened beyond the {self.max_rows} that fit")
        self.rows[number] = row

    def _truncate(self, row: HashRow, verb: Verb) -> None:
        _require("truncate" in self.abilities, f"row {verb.row} was truncated")
        held = len(row.states)
        _require(0 <= verb.value <= held, f"row {verb.row} was cut to {verb.value} of {held}")
        del row.states[verb.value :], row.keys[verb.value :]
        self.counts.truncates += 1

    def _live(self, number: int, purpose: str) -> HashRow:
        row = self.rows.get(number)
        if row is None:
            raise InvariantError(message(f"a row to {purpose} is not allocated", got=number))
        return row

    # --- inputs -----------------------------------------------------------------------------------

    def _feeds(self, work: Work) -> list[HashFeed]:
        lengths = {len(work.rows), len(work.starts), len(work.counts), len(work.logits)}
        _require(len(lengths) == 1, f"the arrays of the feeds have lengths {lengths}")
        offsets = np.concatenate([[0], np.cumsum(work.counts)]).tolist()
        _require(offsets[-1] == len(work.tokens), "the counts of the feeds miss the inputs")
        columns = (work.rows, work.starts, work.counts, work.logits)
        fed = work.rows.tolist()
        _require(set(work.extras) <= set(range(len(fed))), "extras belong to no feed")
        extras = [work.extras.get(f, _PLAIN) for f in range(len(fed))]
        feeds = list(map(HashFeed, offsets[:-1], *(column.tolist() for column in columns), extras))
        _require(len(set(fed)) == len(fed), f"a row was fed twice in one work: {fed}")
        return feeds

    def _check(self, feed: HashFeed, ids: np.ndarray) -> None:
        """What the feed brings and wants are abilities, and each position has one input."""
        extra = feed.extra
        for name in ("positions", "mask"):
            brought = getattr(extra, name) is not None
            _require(not brought or name in self.abilities, f"{name} were fed")
        for name in ("hidden", "layers", "attentions"):
            wanted = getattr(extra, name)
            _require(not wanted or name in self.abilities, f"{name} were wanted")
        given = np.zeros(feed.count, dtype=bool)
        for name, start, values in extra.inputs:
            _require(name in self.abilities, f"{name} were fed")
            fits = start >= 0 and start + len(values) <= feed.count
            _require(fits, f"{name} reach beyond the feed")
            if name == "embeds":
                width = self.function.embed_dim
                _require(tuple(values.shape[1:]) == (width,), "an embedding's width")
                _require(not given[start : start + len(values)].any(), "embeddings overlap")
                given[start : start + len(values)] = True
        inside = (ids >= 0) & (ids < self.vocab_size)
        fits_all = np.where(given, ids == -1, inside)
        _require(bool(fits_all.all()), f"inputs are neither ids nor embeddings: {ids[~fits_all]}")

    def _keys(self, feed: HashFeed, ids: np.ndarray) -> list[int]:
        """One per position: its id or embedding, with every further input and its mask."""
        keys = [self.function.token_key(token) for token in ids.tolist()]
        inputs = sorted(feed.extra.inputs, key=lambda given: given.name != "embeds")
        for name, start, values in inputs:
            found = self.function.keys(values.flatten(1).float())
            for i, key in enumerate(found, start):
                keys[i] = key if name == "embeds" else self.function.joined(keys[i], name, key)
        mask = feed.extra.mask
        if mask is None:
            return keys
        wanted = (feed.count, feed.start + feed.count)
        _require(tuple(mask.shape[1:]) == wanted, f"a mask is not (heads, *{wanted})")
        return [self._masked(mask, feed.start, i, key) for i, key in enumerate(keys)]

    def _masked(self, mask: Tensor, start: int, i: int, key: int) -> int:
        """The key of a position that sees only a part of what stands before it."""
        place = start + i
        _require(not mask[:, i, place + 1 :].any(), "a position sees what stands after it")
        seen = mask[:, i, : place + 1]
        if bool(seen.all()):
            return key
        (found,) = self.function.keys(seen.flatten()[None].float())
        return self.function.joined(key, "mask", found)

    def _positions(self, feed: HashFeed) -> list[tuple[int, ...]]:
        given = feed.extra.positions
        if given is None:
            return [(feed.start + i,) for i in range(feed.count)]
        _require(given.shape[-1] == feed.count, "there is not one position id per input")
        places = given.reshape(-1, feed.count).T.tolist()
        return [tuple(int(coordinate) for coordinate in place) for place in places]

    def _feed(self, feed: HashFeed, keys: list[int], positions: list[tuple[int, ...]]) -> None:
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

    def _count(self, feeds: list[HashFeed]) -> None:
        self.counts.forwards += bool(feeds)
        self.counts.tokens += sum(feed.count for feed in feeds)
        self.counts.chunk_feeds += sum(feed.logits == 0 for feed in feeds)

    # --- outputs ----------------------------------------------------------------------------------

    def _logits(self, feeds: list[HashFeed]) -> Tensor:
        states: list[int] = []
        pairs: list[tuple[int, int]] = []
        for feed in feeds:
            row = self.rows[feed.row]
            wanted = range(feed.start + feed.count - feed.logits, feed.start + feed.count)
            states += [row.states[p] for p in wanted]
            pairs += [(row.keys[p - 1] if p else 0, row.keys[p]) for p in wanted]
        return self.function.logits(_uint64(states), _uint64(pairs).reshape(-1, 2))

    def _answer(self, feed: HashFeed) -> Answer:
        extra, function = feed.extra, self.function
        states = _uint64(self.rows[feed.row].states[feed.start :])
        layers = tuple(function.hidden(states, layer) for layer in range(LAYERS, -1, -1))
        return Answer(
            function.hidden(states) if extra.hidden else None,
            layers if extra.layers else None,
            self._attentions(feed) if extra.attentions else None,
        )

    def _attentions(self, feed: HashFeed) -> tuple[Tensor, ...]:
        hidden = self.function.hidden(_uint64(self.rows[feed.row].states))
        later = torch.ones(feed.count, len(hidden)).triu(feed.start + 1).bool()
        scores = (hidden[feed.start :] @ hidden.T).masked_fill(later, -torch.inf)
        return (torch.softmax(scores, dim=-1).expand(HEADS, -1, -1),) * LAYERS


def _uint64(values: list[int] | list[tuple[int, int]]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(message(f"{broken}, which no executor has to survive"))
