"""Greedy and sampling: every sequence goes on by itself, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.draws import on_host
from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.types import Children, Finished, Group, Scores

Picked = tuple[tuple[np.ndarray, ...], ...]


def continue_each(batch: Batch, tokens: np.ndarray) -> Children:
    """Every sequence has one child with its token, (S,).

    A sequence that has already ended, and lingers, goes on with the pad token. One that has no
    token, -1, ends with an error.
    """
    ended = [s.finish is not None for s in batch.sequences]
    if True in ended:
        pad = np.array([s.request.pad_token for s in batch.sequences])
        tokens = np.where(np.array(ended), pad, tokens)
    counts = np.ones(len(batch), dtype=np.int64)
    parents = np.arange(len(batch))
    finish = [
        s.finish or reason
        for s, reason in zip(batch.sequences, batch.stops(parents, tokens), strict=True)
    ]
    if len(tokens) and tokens.min() < 0:
        counts[tokens < 0] = 0
        for s in np.flatnonzero(tokens < 0).tolist():
            finish[s] = undrawable()
    score = np.array([s.score for s in batch.sequences])
    return Children(parents, tokens[:, None], counts, score, finish, lingers=True)


def in_order(group: Group) -> list[Finished]:
    """The done sequences of a group by their rank."""
    return sorted(group.done, key=lambda done: done.index)


@strategy("greedy")
@dataclass(frozen=True)
class Greedy:
    """The token of the highest score, the first of equals."""

    width: ClassVar[int] = 1
    returns: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(best=1, shortlists=True, alone=True)
    rounds: ClassVar[int] = 1

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """(S,) the choice of every row."""
        values = scores.values
        if on_host(values):  # there numpy is ten times as fast
            best = torch.from_numpy(values.numpy().argmax(axis=-1))
        else:
            best = values.argmax(dim=-1)
        # In either order of a list the first of equals is the lowest id.
        return (best if scores.tokens is None else scores.tokens.gather(1, best[:, None])[:, 0],)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """One child each."""
        return continue_each(batch, picked[0][0])

    def finish(self, group: Group) -> list[Finished]:
        """The one sequence."""
        return in_order(group)


@strategy("sample")
@dataclass(frozen=True)
class Sample:
    """A draw from softmax(scores), for `width` sequences of one prompt."""

    width: int = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(shortlists=True, alone=True)
    rounds: ClassVar[int] = 1

    @property
    def returns(self) -> int:
        return self.width

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """(S,) the choice of every row."""
        return (batch.draws.choose(scores, batch.places()),)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """One child each."""
        return continue_each(batch, picked[0][0])

    def finish(self, group: Group) -> list[Finished]:
        """Every sequence, by its rank."""
        return in_order(group)
