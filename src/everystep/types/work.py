"""What an executor is given for a step, and what it answers: the nouns between it and the engine.

An executor knows rows, positions and ids, and neither requests nor sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

MOST_BEST = 64
"""The most best logits of a row that a feed may want in place of the whole row."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What a row of `length` positions holds, outside of any row.

    `layers`: layer by layer the tensors of its stores. They mean something only to an executor that
    runs the same model, and to `everystep.cache.pasts`, which makes them from cache objects.
    """

    length: int
    layers: tuple[tuple[Tensor, ...], ...]


class Verb(NamedTuple):
    """One change of cache rows: allocate, fork (row from value), truncate (to value) or free."""

    kind: Literal["allocate", "fork", "truncate", "free"]
    row: int
    value: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All that an executor gets for one step.

    `verbs` happened, in this order, since the last step. Then F feeds, as parallel arrays:
    feed f runs `counts[f]` inputs in row `rows[f]` from position `starts[f]` on and wants the
    logits of its last `logits[f]` positions. `tokens`: (N,) ids of all feeds one after another,
    -1 where `embeds` ((offset into N, (n, E) tensor), ...) gives the input. `positions`: (..., N)
    position ids, or None where they equal the row positions. `encoders`, `columns` and `pasts` hold
    for rows allocated by this work: encoder states per row; rows that keep hidden-state columns;
    what a row holds from the start. `best`: (F,) 0, or how many of the best logits feed f wants
    instead of whole rows, at most `MOST_BEST`; None for whole rows everywhere. `totals`: the
    logarithms of the rows' sums of exponentials are of use.
    """

    verbs: tuple[Verb, ...]
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    embeds: tuple[tuple[int, Tensor], ...] = ()
    positions: Tensor | None = None
    encoders: Mapping[int, Tensor] = field(default_factory=dict)
    columns: frozenset[int] = frozenset()
    pasts: Mapping[int, Past] = field(default_factory=dict)
    layers: bool = False
    attentions: bool = False
    best: np.ndarray | None = None
    totals: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The k best logits of R rows, on the host: best first, of equals the lowest id first.

    `values`: (R, k) float32; `tokens`: (R, k) int64 ids; k is the most that any row of the work
    wanted, or V, and what stands in a row beyond its own want has no meaning. `totals`: (R,) as in
    `StepOutput`.
    """

    values: np.ndarray
    tokens: np.ndarray
    totals: np.ndarray | None = None

    def select(self, rows: np.ndarray, count: int) -> Best:
        """The first `count` of the given rows, in the given order."""
        totals = None if self.totals is None else self.totals[rows]
        return Best(self.values[rows, :count], self.tokens[rows, :count], totals)


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What a work produced.

    `logits`: (R, V) of the feeds that want whole rows, in feed order, float32 or wider; R is the
    sum of their wanted counts. `best`: likewise of the feeds that want the best, or None. `totals`:
    (R,) logarithms of the sums of exponentials, or None: whoever needs them takes them from logits.
    `columns`: row -> (cached positions, E) last hidden states of rows that keep columns.
    `layers`: one (N, E) tensor per layer, embeddings first, or None.
    `attentions`, `cross_attentions`: per feed a tuple of (H, counts, S) tensors, or None.
    """

    logits: Tensor
    columns: Mapping[int, Tensor] = field(default_factory=dict)
    layers: tuple[Tensor, ...] | None = None
    attentions: tuple[tuple[Tensor, ...], ...] | None = None
    cross_attentions: tuple[tuple[Tensor, ...], ...] | None = None
    best: Best | None = None
    totals: Tensor | None = None
