"""Runs works in float64 numpy, one row after another: slow, and plain enough to judge others by.

Every row holds whole arrays of keys and values; a fork copies them, a truncation slices them, a
feed appends to them. Nothing is shared between rows, and no code with the cache. What a decoder
computes is not known here, only that it does so for one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.errors import InvariantError, UnsupportedError, message
from everystep.executors.numpy_decoder import NumpyRow, float64, read_decoder
from everystep.models import Model
from everystep.types import StepOutput, Verb, Work


@dataclass(frozen=True, slots=True)
class _Feed:
    """One feed of a work: its place among the N inputs, its row, and what it wants."""

    offset: int
    row: int
    start: int
    count: int
    logits: int


@dataclass(frozen=True, slots=True, eq=False)
class _Fed:
    """What one feed returns: (wanted, V) logits, (count, E) per layer, (H, count, S) per layer."""

    logits: np.ndarray
    layers: list[np.ndarray]
    attentions: list[np.ndarray]


class NumpyExecutor:
    """One engine's executor on a decoder; raises UnsupportedError for any other model.

    Weights are read in float64 on the CPU, whatever the model's type and device, so that a model of
    a narrower type differs from this executor by its own rounding.
    """

    device = torch.device("cpu")
    max_rows: int | None = None
    host_threads: int | None = None
    abilities = frozenset({"truncate", "embeds", "positions", "columns", "layers", "attentions"})

    def __init__(self, model: Model) -> None:
        self._decoder = read_decoder(model)
        self._rows: dict[int, NumpyRow] = {}
        self.vocab_size: int = model.vocab_size

    def run(self, work: Work) -> StepOutput:
        """Apply the verbs in order, run the feeds, return what they want; logits are float64.

        Raises UnsupportedError for several positions per input, InvariantError for every misuse.
        """
        feeds = _feeds(work)
        positions = _positions(work, feeds)
        _require(not work.encoders, "encoder states were given to a decoder")
        for verb in work.verbs:
            self._apply(verb, work)
        for feed in feeds:
            self._check(feed)
        hidden = self._inputs(work)
        fed = [self._feed(f, _span(hidden, f), _span(positions, f)) for f in feeds]
        return self._output(work, fed)

    def audit(self) -> dict[int, int]:
        """Row -> cached positions, for every row that is allocated."""
        return {number: row.length for number, row in self._rows.items()}

    # --- rows -------------------------------------------------------------------------------------

    def _apply(self, verb: Verb, work: Work) -> None:
        if verb.kind == "allocate":
            self._open(verb.row, self._decoder.empty_row(keep=verb.row in work.columns))
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
        for offset, embeds in work.embeds:
            _require(offset + len(embeds) <= len(given), "embeddings reach beyond the inputs")
            given[offset : offset + len(embeds)] = True
        inside = (work.tokens >= 0) & (work.tokens < self.vocab_size)
        right = np.where(given, work.tokens == -1, inside)
        _require(bool(right.all()), f"neither ids nor embeddings were fed: {work.tokens[~right]}")
        hidden = self._decoder.embed(np.where(given, 0, work.tokens))
        for offset, embeds in work.embeds:
            hidden[offset : offset + len(embeds)] = float64(embeds)
        return hidden

    def _feed(self, feed: _Feed, hidden: np.ndarray, positions: np.ndarray) -> _Fed:
        layers, attentions = self._decoder.extend(self._rows[feed.row], hidden, positions)
        wanted = layers[-1][feed.count - feed.logits :]
        return _Fed(self._decoder.logits(wanted), layers, attentions)

    def _output(self, work: Work, fed: list[_Fed]) -> StepOutput:
        logits = np.concatenate([np.empty((0, self.vocab_size)), *(one.logits for one in fed)])
        attentions = tuple(tuple(map(torch.from_numpy, one.attentions)) for one in fed)
        return StepOutput(
            torch.from_numpy(logits),
            columns={
                number: torch.from_numpy(row.hidden)
                for number, row in self._rows.items()
                if row.hidden is not None
            },
            layers=_layers(fed) if work.layers else None,
            attentions=attentions if work.attentions else None,
        )


def _feeds(work: Work) -> list[_Feed]:
    columns = [x.tolist() for x in (work.rows, work.starts, work.counts, work.logits)]
    lengths = {len(column) for column in columns}
    _require(len(lengths) == 1, f"the arrays of the feeds have lengths {sorted(lengths)}")
    offsets = [0, *np.cumsum(work.counts).tolist()]
    _require(offsets[-1] == len(work.tokens), "the counts of the feeds miss the inputs")
    rows = columns[0]
    _require(len(set(rows)) == len(rows), f"a row was fed twice in one work: {rows}")
    return [_Feed(*values) for values in zip(offsets[:-1], *columns, strict=True)]


def _positions(work: Work, feeds: list[_Feed]) -> np.ndarray:
    """(N,) position ids."""
    if work.positions is None:
        places = [np.arange(feed.start, feed.start + feed.count) for feed in feeds]
        return np.concatenate([np.empty(0, dtype=np.int64), *places])
    if work.positions.numel() != len(work.tokens):
        raise UnsupportedError(
            message(
                "this executor has one position per input",
                wanted=f"{len(work.tokens)} position ids",
                got=tuple(work.positions.shape),
            )
        )
    return work.positions.flatten().cpu().numpy()


def _layers(fed: list[_Fed]) -> tuple[Tensor, ...]:
    """One (N, E) tensor per layer, embeddings first."""
    by_layer = zip(*(one.layers for one in fed), strict=True)
    return tuple(torch.from_numpy(np.concatenate(parts)) for parts in by_layer)


def _span(values: np.ndarray, feed: _Feed) -> np.ndarray:
    return values[feed.offset : feed.offset + feed.count]


def _require(holds: bool, broken: str) -> None:
    if not holds:
        raise InvariantError(message(broken))
