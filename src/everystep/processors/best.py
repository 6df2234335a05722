"""Finds the best tokens of wide rows without sorting them, on the CPU.

A row is read once, for the highest score of every block of neighbours. Only blocks whose highest
one reaches a threshold are looked at again; a threshold that as many blocks reach as tokens are
wanted leaves none of those out. Where a list already holds the best, it is cut.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from everystep.devices import on_host
from everystep.draws import weights
from everystep.processors.stacking import Counts, Numbers, greatest
from everystep.types import Scores

_NARROW = 4096
_BLOCK = 64
_MOST = 1024  # tokens of one row; longer lists are worth no more than whole rows


def is_wide(scores: Tensor) -> bool:
    """Return whether looking for few of the tokens is worth while, and possible."""
    fits = on_host(scores) and scores.dtype in (torch.float32, torch.float64)
    return fits and scores.shape[-1] > _NARROW


def is_few(count: int, vocabulary: int) -> bool:
    """Return whether so many of a row's tokens are looked for without all others."""
    return vocabulary > _NARROW and count * 2 <= math.ceil(vocabulary / _BLOCK)


def best_of(scores: Scores, count: Counts, temperature: Numbers = 1.0) -> Scores | None:
    """Return lists of the `count` best of each row and of all that equal the last of them.

    None if those are many. Whole rows, which must be wide, are divided by a temperature first. Rows
    whose lists do not decide are read whole.
    """
    if scores.tokens is None:
        return _best_of_whole(scores, count, temperature)
    values = scores.values.numpy()
    last = np.maximum(values.shape[1] - np.asarray(count)[..., None], 0)
    lowest = np.sort(values, axis=1)[np.arange(len(values))[:, None], last]
    kept = _kept(scores, ~(values < lowest) & (values != -np.inf))
    if scores.rest is None:
        return kept
    rest = scores.rest.numpy()
    undecided = np.flatnonzero((lowest <= rest) & (rest > -np.inf))
    if not len(undecided):
        return kept
    own = tuple(count[r] for r in undecided) if isinstance(count, tuple) else count
    rows = torch.from_numpy(undecided)
    found = _best_of_whole(scores.select(rows).whole(), own, 1.0)
    return None if found is None else kept.put(rows, found)


def _best_of_whole(scores: Scores, count: Counts, temperature: Numbers) -> Scores | None:
    if not is_few(greatest(count), scores.vocabulary):
        return None
    highest = block_highest(scores, temperature)
    wanted = np.broadcast_to(np.asarray(count)[..., None], (len(scores), 1))
    reached = np.take_along_axis(np.sort(highest, axis=1), highest.shape[1] - wanted, axis=1)
    found = above(scores, temperature, highest, reached)
    return None if found is None else best_of(found, count)


def block_highest(scores: Scores, temperature: Numbers) -> np.ndarray:
    """Return (R, ceil(V / 64)) the highest of each block of rows, divided by the temperature."""
    values, size = scores.values, scores.vocabulary
    whole = size - size % _BLOCK
    parts = [values[:, :whole].reshape(len(values), -1, _BLOCK).amax(dim=-1)]
    if whole < size:
        parts.append(values[:, whole:].amax(dim=-1, keepdim=True))
    return _divided(torch.cat(parts, dim=1).numpy(), temperature, slice(None))


def above(
    scores: Scores, temperature: Numbers, highest: np.ndarray, threshold: np.ndarray
) -> Scores | None:
    """Return lists of what is not below the threshold (R, 1), nor -inf; None if that is much.

    The scores and `highest`, as `block_highest` gives it, are those of whole rows.
    """
    values = scores.values.numpy()
    rows, size = values.shape
    threshold = np.maximum(threshold, np.finfo(values.dtype).min)
    row, block = np.nonzero(~(highest < threshold))  # nan is below nothing
    if len(row) > _MOST * rows:
        return None
    begin = block * _BLOCK
    start = np.minimum(begin, size - _BLOCK)
    near = sliding_window_view(values, _BLOCK, axis=1)[row, start]  # (blocks, 64)
    near = _divided(near, temperature, row)
    good = ~(near < threshold[row])
    # A last block that is short begins within the one before.
    good[start < begin] &= np.arange(_BLOCK) >= _BLOCK - size % _BLOCK
    which, offset = np.nonzero(good)
    owner = row[which]
    number = np.bincount(owner, minlength=rows)
    if number.max(initial=0) > _MOST:
        return None
    return _table(owner, start[which] + offset, near[good], number, size)


def _divided(values: np.ndarray, temperature: Numbers, row: Any) -> np.ndarray:
    """Return values of the given rows, divided by the temperatures of those."""
    heat: Any = temperature
    if isinstance(temperature, tuple):
        heat = np.array(temperature, dtype=values.dtype)[row, None]
    with np.errstate(over="ignore"):
        return values / heat


def _table(
    row: np.ndarray, token: np.ndarray, value: np.ndarray, number: np.ndarray, vocabulary: int
) -> Scores:
    """Make lists of tokens and values row after row, (C,) each; `number`: (R,) how many of each."""
    size = (len(number), max(int(number.max(initial=0)), 1))
    place = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
    tokens = np.zeros(size, dtype=np.int64)
    values = np.full(size, -np.inf, dtype=value.dtype)
    tokens[row, place], values[row, place] = token, value
    return Scores(torch.from_numpy(values), torch.from_numpy(tokens), vocabulary)


def _kept(scores: Scores, keep: np.ndarray) -> Scores:
    """Return the places of lists that are kept, (R, n) bool, alone."""
    number = keep.sum(axis=1)
    tokens, values = scores.tokens.numpy()[keep], scores.values.numpy()[keep]  # type: ignore[union-attr]
    width = int(number.max(initial=0))
    if width and len(tokens) == width * len(number):  # without ties all rows are as long
        size = (len(number), width)
        ids, kept = torch.from_numpy(tokens.reshape(size)), torch.from_numpy(values.reshape(size))
        return Scores(kept, ids, scores.vocabulary)
    return _table(np.nonzero(keep)[0], tokens, values, number, scores.vocabulary)


def without(scores: Scores, removed: Tensor) -> Scores:
    """Return lists with -inf where `removed`, (R, n) bool, says so."""
    return replace(scores, values=scores.values.masked_fill(removed, -math.inf), totals=None)


def total_weight(scores: np.ndarray) -> np.ndarray:
    """Return (R, 1) float64: the sum of its `weights`."""
    return weights(scores).sum(axis=1, dtype=np.float64, keepdims=True)


def beyond_mass(
    scores: np.ndarray, top_p: np.ndarray, keep: np.ndarray, whole: np.ndarray | None = None
) -> np.ndarray:
    """Return (R, n) bool: tokens that follow better ones whose share of all is at least `top_p`.

    `whole`: (R, 1) the sum of all `weights`, where the scores are only the best of their rows. The
    `keep` best are not removed. Of equal scores the one of a higher id is the better; scores of
    -inf change nothing, so that a list gives what the whole row gives.
    """
    ordered = np.sort(scores, axis=1)[:, ::-1]
    mass = weights(ordered).cumsum(axis=1, dtype=np.float64)
    wanted = top_p * (mass[:, -1:] if whole is None else whole)
    number = 1 + (mass[:, :-1] < wanted).sum(axis=1, keepdims=True)
    number = np.minimum(np.maximum(number, keep), scores.shape[1])
    last = ordered[np.arange(len(scores))[:, None], number - 1]
    removed: np.ndarray = scores < last
    spare = (scores.shape[1] - removed.sum(axis=1, keepdims=True)) - number
    for r in np.flatnonzero(spare > 0):
        equal = np.flatnonzero(scores[r] == last[r])
        removed[r, equal[: int(spare[r, 0])]] = True
    return removed
