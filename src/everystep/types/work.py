"""What an executor gets for a step, and what it returns: the types it shares with the engine.

An executor knows rows, positions and ids, and neither requests nor sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.types.scores import Scores

MOST_POSITION = 2**31 - 1
"""The greatest position id."""
MOST_BEST = 64
"""The most of the best logits of a row that a feed may want in place of the whole row."""


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """The contents of a row of `length` positions, outside of any row.

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


@dataclass(frozen=True, slots=True)
class InputSpec:
    """An input that a model declares: what it is given beside ids or embeddings.

    `per`: "token": a prompt gives (length, *shape), one entry per position of it; "prompt": one
    entry (*shape), which every position of the prompt is given; "row": one entry, which generated
    positions are given too. `dtype`: what the model computes with; what can be cast to it is taken.
    `open`: entries have any shape and type, and a prompt may also be given a value as a whole, see
    `Prompt.whole`. `after`: what generated positions are given of an input per token.
    """

    name: str
    per: Literal["token", "row", "prompt"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    open: bool = False
    after: Literal["nothing", "zeros", "last"] = "nothing"

    def shape_of(self, length: int, values: Tensor) -> tuple[int, ...]:
        """Return the shape that values for `length` positions have to have."""
        inner = tuple(values.shape[1:]) if self.open else self.shape
        return (length, *inner) if self.per == "token" else inner

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether values of a type can be given."""
        return self.open or torch.can_cast(dtype, self.dtype)


class Given(NamedTuple):
    """One named input of some positions of a feed.

    `name`: "embeds", or an input that the model declares. `start`: the first position it belongs
    to, counted from the feed's first. `values`: (n, ...), one entry per position.
    """

    name: str
    start: int
    values: Tensor


class ResolvedAdapter(Protocol):
    """The adapter that a name stands for in a request; nothing changes it.

    Two are equal only if they are the same, which their numbers say too.
    """

    @property
    def number(self) -> int:
        """A number that no other has had in this process."""

    @property
    def needs(self) -> frozenset[str]:
        """The abilities that an executor must have to compute it."""


@dataclass(frozen=True, slots=True, eq=False)
class Extra:
    """The inputs and wishes of one feed beyond ids and logits; they concern no other feed.

    `positions`: (count,) or (axes, count) position ids; None: the places in the row. `mask`: (1 or
    H, count, start + count) bool, what each fed position sees of the row; None: everything up to
    itself. `adapters`: (name, weight) pairs; `resolved`: what their names stand for, one for each,
    empty where the executor knows the names itself. `hidden`: the last hidden states, normalised;
    `layers`: the hidden states before the first layer and after each; `attentions`: the attention
    weights of each layer are wanted. `whole`: what the prompt that this feed begins with is given
    as a whole, by name. `early`: the layers before which hidden states are to be read out, at the
    positions whose logits are wanted.
    """

    inputs: tuple[Given, ...] = ()
    positions: Tensor | None = None
    mask: Tensor | None = None
    adapters: tuple[tuple[str, float], ...] = ()
    hidden: bool = False
    layers: bool = False
    attentions: bool = False
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    early: tuple[int, ...] = ()
    resolved: tuple[ResolvedAdapter, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The results of one feed beyond logits; None where it did not want one.

    `hidden`: (count, E). `layers`: (count, E) each, embeddings first, the last one normalised.
    `attentions`, `cross_attentions`: (H, count, S) each, over the row and over encoder states.
    `early`: (layers, logits, V) what the head alone makes of hidden states before earlier layers.
    """

    hidden: Tensor | None = None
    layers: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    early: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """All that an executor gets for one step.

    `verbs` happened, in this order, since the last step. Then F feeds, as parallel arrays:
    feed f runs `counts[f]` inputs in row `rows[f]` from position `starts[f]` on and wants the
    logits of its last `logits[f]` positions. `tokens`: (N,) ids of all feeds one after another,
    -1 where the feed is given an embedding. `extras`: what feed f brings and wants beyond that;
    plain feeds have none. `encoders` and `pasts` hold for rows allocated by this work: encoder
    states per row; what a row holds from the start. `best`: (F,) 0, or how many of the best logits
    feed f wants instead of whole rows, at most `MOST_BEST`; None for whole rows everywhere.
    `totals`: whether the logarithms of the rows' sums of exponentials are wanted. `whole`: whether
    the whole rows of those lists are wanted too, to be looked at; an executor may leave them out.
    """

    verbs: tuple[Verb, ...]
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray
    extras: Mapping[int, Extra] = field(default_factory=dict)
    encoders: Mapping[int, Tensor] = field(default_factory=dict)
    pasts: Mapping[int, Past] = field(default_factory=dict)
    best: np.ndarray | None = None
    totals: bool = False
    whole: bool = False

    @property
    def offsets(self) -> np.ndarray:
        """(F,) where the inputs of each feed begin among all N."""
        return np.cumsum(self.counts) - self.counts


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """The results of a work.

    `logits`: (R, V) of the feeds that want whole rows, in feed order, float32 or wider; R is the
    sum of their wanted counts. `best`: likewise of the feeds that want the best, as lists on the
    host, float32, best first, of equals the lowest id first, a nan above all; or None. `totals`:
    (R,) logarithms of the sums of exponentials, or None: then they are computed from the logits
    where needed. `best_rows`: (B, V) the whole rows of those lists, where the work wants them.
    `answers`: what feeds wanted beyond logits, by the index of the feed.
    """

    logits: Tensor
    answers: Mapping[int, Answer] = field(default_factory=dict)
    best: Scores | None = None
    totals: Tensor | None = None
    best_rows: Tensor | None = None
