"""Greedy and sampling: every sequence goes on by itself, one token at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_host
from everystep.errors import RequestError, shown
from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.types import Children, Finished, Group, Scores

Picked = tuple[tuple[np.ndarray, ...], ...]


def continue_each(batch: Batch, tokens: np.ndarray) -> Children:
    """Give every sequence one child with its token, (S,).

    A sequence that has already ended, and lingers, goes on with the pad token. One that has no
    token, -1, ends with an error.
    """
    fits = isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu"
    if not fits or tokens.shape != (len(batch),):
        what, wanted = "a strategy chose no tokens", f"({len(batch)},) integers, one per sequence"
        raise RequestError(what, wanted=wanted, got=shown(tokens))
    ended, parents = [s.finish for s in batch.sequences], np.arange(len(batch))
    counts = np.ones(len(batch), dtype=np.int64)
    if any(ended):
        pad = np.array([s.request.pad_token for s in batch.sequences])
        tokens = np.where([reason is not None for reason in ended], pad, tokens)
    reasons = batch.stops(parents, tokens)
    finish = [before or now for before, now in zip(ended, reasons, strict=True)]
    for s in (tokens < 0).nonzero()[0].tolist():
        counts[s], finish[s] = 0, undrawable()
    score = np.array([s.score for s in batch.sequences])
    return Children(parents, tokens[:, None], counts, score, finish, lingers=True)


def in_order(group: Group) -> list[Finished]:
    """Return the done sequences of a group by their rank."""
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
        """Choose for every row, (S,), -1 where every token is ruled out or one is nan.

        In either order of a list the first of equals is the lowest id.
        """
        values, tokens = scores.values, scores.tokens
        if not on_host(values):
            top, best = values.max(dim=-1)
            found = best if tokens is None else tokens.gather(1, best[:, None])[:, 0]
            return (torch.where(top > -torch.inf, found, -1),)
        chosen = values.numpy().argmax(axis=-1)  # ten times as fast as torch; the first nan if any
        rows = np.arange(len(chosen))
        lost = ~(values.numpy()[rows, chosen] > -np.inf)
        if tokens is not None:
            chosen = tokens.numpy()[rows, chosen]
        return (torch.from_numpy(np.where(lost, -1, chosen) if lost.any() else chosen),)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Return one child each."""
        return continue_each(batch, picked[0][0])

    def finish(self, group: Group) -> list[Finished]:
        """Return the one sequence."""
        return in_order(group)


@strategy("sample")
@dataclass(frozen=True)
class Sample:
    """A draw from softmax(scores), for `width` sequences of one prompt."""

    width: int = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(shortlists=True, alone=True, number=True)
    rounds: ClassVar[int] = 1

    @property
    def returns(self) -> int:
        return self.width

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Choose for every row, (S,)."""
        return (batch.draws.choose(scores, batch.places()),)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Return one child each."""
        return continue_each(batch, picked[0][0])

    def finish(self, group: Group) -> list[Finished]:
        """Return every sequence, by its rank."""
        return in_order(group)
