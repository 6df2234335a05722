"""Runs works in float64 numpy, one row after another: slow, and plain enough to judge others by.

Every row holds whole arrays of keys and values; a fork copies them, a truncation slices them, a
feed appends to them. Nothing is shared between rows, and no code with the cache. What a decoder
computes is not known here, only that it does so for one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from everystep.errors import InvariantError, message
from everystep.executors.positions import declared_inputs, given_inputs, position_ids
from everystep.models import Model
from everystep.testing.numpy_decoder import NumpyRow, float64, read_decoder
from everystep.types import Answer, Extra, InputSpec, StepOutput, Verb, Work

_PLAIN = Extra()


@dataclass(frozen=True, slots=True)
class _Feed:
    """One feed of a work: its index, its place among the N inputs, its row, and what it wants."""

    index: int
    offset: int
    row: int
    start: int
    count: int
    logits: int


@dataclass(frozen=True, slots=True, eq=False)
class _Fed:
    """What one feed returns: (wanted, V) logits, and what it wants beyond them."""

    logits: np.ndarray
    answer: Answer


class NumpyExecutor:
    """One engine's executor on a decoder; raises UnsupportedError for any other model.

    Weights are read in float64 on the CPU, whatever the model's type and device, so that a model of
    a narrower type differs from this executor by its own rounding.
    """

    device = torch.device("cpu")
    host_threads: int | None = None
    abilities = frozenset(
        {"truncate", "cut", "embeds", "positions", "mask", "hidden", "layers", "attentions"}
    )

    def __init__(self, model: Model) -> None:
        self._decoder = read_decoder(model)
        self._rows: dict[int, NumpyRow] = {}
        self._axes = model.network.axes
        self.inputs: Mapping[str, InputSpec] = declared_inputs(model.network)
        self.vocab_size: int = model.vocab_size

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want; logits are float64.

        Raises RequestError for positions that do not fit, InvariantError for every misuse.
        """
        feeds = _feeds(work)
        positions = position_ids(work, self._axes)
        _require(not work.encoders, "encoder states were given to a decoder")
        for verb in work.verbs:
            self._apply(verb, work)
        for feed in feeds:
            self._check(feed)
        hidden = self._inputs(work)
        fed = [
            self._feed(feed, work.extras.get(feed.index, _PLAIN), hidden, positions)
            for feed in feeds
        ]
        logits = np.concatenate([np.empty((0, self.vocab_size)), *(one.logits for one in fed)])
        answers = {f: fed[f].answer for f in work.extras}
        return StepOutput(torch.from_numpy(logits), answers)

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        return {number: row.length for number, row in self._rows.items()}

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, verb: Verb, work: Work) -> None:
        if verb.kind == "allocate":
            self._open(verb.row, self._decoder.empty_row())
        elif verb.kind == "fork":
            source = self._live(verb.value)
            self._open(verb.row, source.first(source.length))
        elif verb.kind == "truncate":
            row = self._live(verb.row)
            fits = 0 <= verb.value <= row.length
            _require(fits, f"row {verb.row} of {row.length} positions was cut to {verb.value}")
            self._rows[verb.row] = row.first(verb.value)
        else:
            self._live(verb.row)
            del self._rows[verb.row]

    def _open(self, number: int, row: NumpyRow) -> None:
        _require(number not in self._rows, f"row {number} was opened while it was live")
        self._rows[number] = row

    def _live(self, number: int) -> NumpyRow:
        _require(number in self._rows, f"row {number} was used without being allocated")
        return self._rows[number]

    # --- feeds ------------------------------------------------------------------------------------

    def _check(self, feed: _Feed) -> None:
        held = self._live(feed.row).length
        _require(feed.count > 0, f"row {feed.row} was fed nothing")
        _require(feed.start == held, f"row {feed.row} was fed at {feed.start} with {held} cached")
        _require(0 <= feed.logits <= feed.count, f"row {feed.row} wants logits of unfed positions")

    def _inputs(self, work: Work) -> np.ndarray:
        """(N, E) embeddings of everything that is fed."""
        given = np.zeros(len(work.tokens), dtype=bool)
        embeds = [*given_inputs(work, "embeds")]
        for start, values in embeds:
            _require(start + len(values) <= len(given), "embeddings reach beyond the inputs")
            given[start : start + len(values)] = True
        inside = (work.tokens >= 0) & (work.tokens < self.vocab_size)
        right = np.where(given, work.tokens == -1, inside)
        _require(bool(right.all()), f"neither ids nor embeddings were fed: {work.tokens[~right]}")
        hidden = self._decoder.embed(np.where(given, 0, work.tokens))
        for start, values in embeds:
            hidden[start : start + len(values)] = float64(values)
        return hidden

    def _feed(self, feed: _Feed, extra: Extra, hidden: np.ndarray, positions: np.ndarray) -> _Fed:
        row, mask = self._rows[feed.row], None if extra.mask is None else extra.mask.numpy()
        span = slice(feed.offset, feed.offset + feed.count)
        found = self._decoder.extend(row, hidden[span], positions[..., span], mask)
        layers, attentions = found
        wanted = layers[-1][feed.count - feed.logits :]
        answer = Answer(
            torch.from_numpy(layers[-1]) if extra.hidden else None,
            tuple(map(torch.from_numpy, layers)) if extra.layers else None,
            tuple(map(torch.from_numpy, attentions)) if extra.attentions else None,
        )
        return _Fed(self._decoder.logits(wanted), answer)


def _feeds(work: Work) -> list[_Feed]:
    columns = [x.tolist() for x in (work.rows, work.starts, work.counts, work.logits)]
    lengths = {len(column) for column in columns}
    _require(len(lengths) == 1, f"the arrays of the feeds have lengths {sorted(lengths)}")
    offsets = [0, *np.cumsum(work.counts).tolist()]
    _require(offsets[-1] == len(work.tokens), "the counts of the feeds miss the inputs")
    rows = columns[0]
    _require(len(set(rows)) == len(rows), f"a row was fed twice in one work: {rows}")
    return [*map(_Feed, range(len(rows)), offsets[:-1], *columns)]


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(message(broken))
