"""Finds the best tokens of wide rows without sorting them, on the CPU.

A row is read once, for the highest score of every block of neighbours. Only blocks whose highest
one reaches a threshold are looked at again; a threshold that as many blocks reach as tokens are
wanted leaves none of those out. Where an executor has told the best, nothing is left to find.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from everystep.draws import on_host, weights
from everystep.processors.stacking import Counts, Numbers, greatest
from everystep.types import Best, Shortlist

_NARROW = 4096
_BLOCK = 64
_MOST = 1024  # tokens of one row; longer lists are worth no more than whole rows


def is_wide(scores: Tensor) -> bool:
    """Whether looking for few of the tokens is worth while, and possible."""
    fits = on_host(scores) and scores.dtype in (torch.float32, torch.float64)
    return fits and scores.shape[-1] > _NARROW


def is_few(count: int, vocabulary: int) -> bool:
    """Whether so many of a row's tokens are looked for without all others."""
    return vocabulary > _NARROW and count * 2 <= math.ceil(vocabulary / _BLOCK)


@dataclass(frozen=True, eq=False)
class Blocks:
    """`scores` (R, V), to be divided by `heat`, a number or (R, 1); `highest` (R, ceil(V / 64)) of
    every block, divided already."""

    scores: np.ndarray
    heat: Any
    highest: np.ndarray

    @classmethod
    def of(cls, scores: Tensor, temperature: Numbers) -> Blocks:
        """Wide scores that are to be divided by a temperature, which raises no lower score above a
        higher one."""
        size = scores.shape[1]
        whole = size - size % _BLOCK
        parts = [scores[:, :whole].reshape(len(scores), -1, _BLOCK).amax(dim=-1)]
        if whole < size:
            parts.append(scores[:, whole:].amax(dim=-1, keepdim=True))
        array = scores.numpy()
        heat: Any = temperature
        if isinstance(temperature, tuple):
            heat = np.array(temperature, dtype=array.dtype)[:, None]
        return cls(array, heat, _divided(torch.cat(parts, dim=1).numpy(), heat))

    def first(self, count: Counts) -> Shortlist | None:
        """The `count` best of each row, and all that equal the last of them; None if many are."""
        most = self.highest.shape[1]
        if not is_few(greatest(count), self.scores.shape[1]):
            return None
        wanted = np.broadcast_to(np.asarray(count)[..., None], (len(self.scores), 1))
        reached = np.take_along_axis(np.sort(self.highest, axis=1), most - wanted, axis=1)
        short = self.above(reached)
        return None if short is None else best_of(short, count)

    def above(self, threshold: np.ndarray) -> Shortlist | None:
        """What is not below the threshold (R, 1), nor -inf; None if that is many tokens."""
        rows, size = self.scores.shape
        threshold = np.maximum(threshold, np.finfo(self.scores.dtype).min)
        row, block = np.nonzero(~(self.highest < threshold))  # nan is below nothing
        if len(row) > _MOST * rows:
            return None
        begin = block * _BLOCK
        start = np.minimum(begin, size - _BLOCK)
        near = sliding_window_view(self.scores, _BLOCK, axis=1)[row, start]  # (blocks, 64)
        near = _divided(near, self.heat[row] if isinstance(self.heat, np.ndarray) else self.heat)
        good = ~(near < threshold[row])
        # A last block that is short begins within the one before.
        good[start < begin] &= np.arange(_BLOCK) >= _BLOCK - size % _BLOCK
        which, offset = np.nonzero(good)
        return _listed(row[which], start[which] + offset, near[good], (rows, size))


def _divided(scores: np.ndarray, heat: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        cooled: np.ndarray = scores / heat
    return cooled


def _listed(
    row: np.ndarray, token: np.ndarray, score: np.ndarray, shape: tuple[int, int]
) -> Shortlist | None:
    """Tokens and scores row after row, (C,) each, as a table."""
    number = np.bincount(row, minlength=shape[0])
    if number.max(initial=0) > _MOST:
        return None
    return _table(row, token, score, number, shape[1])


def _table(
    row: np.ndarray, token: np.ndarray, score: np.ndarray, number: np.ndarray, vocabulary: int
) -> Shortlist:
    """As `_listed`; `number`: (R,) how many tokens each row has."""
    size = (len(number), max(int(number.max(initial=0)), 1))
    place = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
    tokens = np.zeros(size, dtype=np.int64)
    scores = np.full(size, -np.inf, dtype=score.dtype)
    tokens[row, place], scores[row, place] = token, score
    return Shortlist(torch.from_numpy(tokens), torch.from_numpy(scores), vocabulary)


def told(best: Best, counts: np.ndarray, vocabulary: int) -> Shortlist:
    """The first `counts`, (R,), of the best of R rows as lists that know what the rest is below."""
    width = int(counts.max())
    values, tokens = best.values[:, :width], best.tokens[:, :width]
    rest = values[np.arange(len(counts)), counts - 1][:, None]
    if counts.min() < width:
        none = np.arange(width) >= counts[:, None]
        values, tokens = np.where(none, -np.inf, values), np.where(none, vocabulary - 1, tokens)
    rising = np.arange(len(counts))[:, None], np.argsort(tokens, axis=1)
    ids, scores = torch.from_numpy(tokens[rising]), torch.from_numpy(values[rising])
    return Shortlist(ids, scores, vocabulary, torch.from_numpy(rest))


def best_of(short: Shortlist, count: Counts) -> Shortlist | None:
    """The `count` best of each row, and all that equal the last of them; nothing else is listed.

    None where something that is not listed may equal it.
    """
    scores = short.scores.numpy()
    last = np.maximum(scores.shape[1] - np.asarray(count)[..., None], 0)
    lowest = np.sort(scores, axis=1)[np.arange(len(scores))[:, None], last]
    if short.rest is not None:
        rest = short.rest.numpy()
        if ((lowest <= rest) & (rest > -np.inf)).any():
            return None
    return _kept(short, ~(scores < lowest) & (scores != -np.inf))


def _kept(short: Shortlist, keep: np.ndarray) -> Shortlist:
    """The tokens that are kept, (R, n) bool, alone."""
    number = keep.sum(axis=1)
    tokens, scores = short.tokens.numpy()[keep], short.scores.numpy()[keep]
    width = int(number.max(initial=0))
    if width and len(tokens) == width * len(number):  # without ties all rows are as long
        size = (len(number), width)
        ids, kept = torch.from_numpy(tokens.reshape(size)), torch.from_numpy(scores.reshape(size))
        return Shortlist(ids, kept, short.vocabulary)
    return _table(np.nonzero(keep)[0], tokens, scores, number, short.vocabulary)


def total_weight(scores: np.ndarray) -> np.ndarray:
    """(R, 1) float64: the sum of its `weights`."""
    total: np.ndarray = weights(scores).sum(axis=1, dtype=np.float64, keepdims=True)
    return total


def beyond_mass(
    scores: np.ndarray, top_p: np.ndarray, keep: np.ndarray, whole: np.ndarray | None = None
) -> np.ndarray:
    """(R, n) bool: tokens that follow better ones whose share of the whole is at least `top_p`.

    `whole`: (R, 1) the sum of all `weights`, where the scores are only the best of their rows. The
    `keep` best are not removed. Of equal scores the one of a higher id is the better; scores of
    -inf change nothing, so that a shortlist gives what the whole row gives.
    """
    ordered = np.sort(scores, axis=1)[:, ::-1]
    mass = weights(ordered).cumsum(axis=1, dtype=np.float64)
    enough = top_p * (mass[:, -1:] if whole is None else whole)
    number = 1 + (mass[:, :-1] < enough).sum(axis=1, keepdims=True)
    number = np.minimum(np.maximum(number, keep), scores.shape[1])
    last = ordered[np.arange(len(scores))[:, None], number - 1]
    removed: np.ndarray = scores < last
    spare = (scores.shape[1] - removed.sum(axis=1, keepdims=True)) - number
    for r in np.flatnonzero(spare > 0):
        equal = np.flatnonzero(scores[r] == last[r])
        removed[r, equal[: int(spare[r, 0])]] = True
    return removed
