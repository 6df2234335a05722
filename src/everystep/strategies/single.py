"""Greedy and sampling: every sequence goes on by itself, one token at a time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.draws import on_host
from everystep.strategies.base import Batch, Drafts, Reads, require_drawn
from everystep.types import Children, Finished, Group, Scores, Sequence, TokenTable


def continue_each(batch: Batch, tokens: np.ndarray, counts: np.ndarray) -> Children:
    """Every sequence has one child with its (S, n) tokens, cut where a stop ends it.

    A sequence that has already ended, and lingers, goes on with the pad token.
    """
    ended = [s.finish is not None for s in batch.sequences]
    if True in ended:
        pad = np.array([s.request.pad_token for s in batch.sequences])
        tokens = np.where(np.array(ended)[:, None], pad[:, None], tokens)
        counts = np.where(ended, 1, counts)
    width = tokens.shape[1]
    require_drawn(tokens if width == 1 else tokens[np.arange(width) < counts[:, None]])
    parents = np.arange(len(batch))
    kept, reasons = batch.stops(parents, tokens, counts)
    finish = [s.finish or reason for s, reason in zip(batch.sequences, reasons, strict=True)]
    score = np.array([s.score for s in batch.sequences])
    return Children(parents, tokens, kept, score, finish, lingers=True)


@dataclass(frozen=True)
class Greedy:
    """The token of the highest score, the first of equals."""

    width: ClassVar[int] = 1
    returns: ClassVar[int] = 1
    kept_rows: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(best=1, shortlists=True)
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def kind(self) -> Hashable:
        return "greedy"

    def opening_score(self, index: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return None

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        """(R,) the choice of every row."""
        values = scores.values
        if on_host(values):  # there numpy is ten times as fast
            best = torch.from_numpy(values.numpy().argmax(axis=-1))
        else:
            best = values.argmax(dim=-1)
        # In either order of a list the first of equals is the lowest id.
        return (best if scores.tokens is None else scores.tokens.gather(1, best[:, None])[:, 0],)

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        return continue_each(batch, picked[0][batch.first_row, None], np.array([1] * len(batch)))

    def keep(self, group: Group) -> list[Finished]:
        return group.done

    def finish(self, group: Group) -> list[Finished]:
        return sorted(group.done, key=lambda done: done.index)


@dataclass(frozen=True)
class Sample:
    """A draw from softmax(scores), for `width` sequences of one prompt."""

    width: int = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(shortlists=True)
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def returns(self) -> int:
        return self.width

    @property
    def kept_rows(self) -> int:
        return self.width

    @property
    def kind(self) -> Hashable:
        return "sample"

    def opening_score(self, index: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return None

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        """(R,) the choice of every row."""
        return (batch.draws.choose(scores, batch.row_places()),)

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        return continue_each(batch, picked[0][batch.first_row, None], np.array([1] * len(batch)))

    def keep(self, group: Group) -> list[Finished]:
        return group.done

    def finish(self, group: Group) -> list[Finished]:
        return sorted(group.done, key=lambda done: done.index)
