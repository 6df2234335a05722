"""A few new scores as data: where they stand in the flat scores, and what they become.

Writing them costs what they are, not what the vocabulary is wide; who owns the scores writes. An
edit knows the new scores; `revised` makes them of the old ones, a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device, on_host

# Places that are revised at once: enough for a call, and few enough to stay in the core's cache.
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Edit:
    """`index`: (C,) places in the scores, row after row. `value`: (C,) what stands there, or one
    number. A place that occurs twice has the same value both times. `emptied`: (n,) rows whose
    other places all become -inf."""

    index: Tensor
    value: Tensor | float
    emptied: Tensor | None = None

    def written(self, scores: Tensor) -> Tensor:
        """Change the contiguous scores in place and return them."""
        if self.emptied is not None:
            if len(self.emptied) == len(scores):
                scores.fill_(-math.inf)
            else:
                scores.index_fill_(0, self.emptied, -math.inf)
        scores.view(-1).scatter_(0, self.index, self.value)
        return scores


class Stretch(NamedTuple):
    """Places of neighbouring rows: `places` (C,) in the flat scores of these `rows`, of which
    `counts[r]` belong to the r-th of them."""

    rows: slice
    places: np.ndarray
    counts: list[int]

    def own(self, value: float | tuple[float, ...], old: Any) -> Any:
        """Return a number as it is; of one per row that of each place's row, (C,) as `old` is."""
        if not isinstance(value, tuple):
            return value
        return alike(np.repeat(np.array(value[self.rows]), self.counts), old)


def revised(
    scores: Tensor, stretches: Iterable[Stretch], revise: Callable[[Any, Stretch], Any]
) -> Tensor:
    """Change the contiguous scores in place and return them.

    `revise`: (C,) old scores of a stretch, an array or a tensor -> as many new ones. A place that
    occurs twice in a stretch gets the same both times.
    """
    if not _is_array(scores):
        for stretch in stretches:
            part = scores[stretch.rows].view(-1)
            index = on_device(scores.device, stretch.places)
            part.scatter_(0, index, revise(part.index_select(0, index), stretch))
        return scores
    array = scores.numpy()
    with np.errstate(all="ignore"):
        for stretch in stretches:
            flat = array[stretch.rows].reshape(-1)
            flat[stretch.places] = revise(flat[stretch.places], stretch)
    return scores


def _is_array(scores: Tensor) -> bool:
    """Return whether numpy may change the scores; it calculates equally, with fewer calls."""
    known = scores.dtype is torch.float32 or scores.dtype is torch.float64
    return known and on_host(scores) and not scores.requires_grad


def stretches(tokens: Sequence[np.ndarray], scores: Tensor) -> Iterator[Stretch]:
    """Yield the places of each row's tokens, all of which the (R, V) scores have."""
    room = _AT_ONCE if _is_array(scores) else math.inf
    counts = [len(part) for part in tokens]
    first = 0
    while first < len(tokens):
        last, count = first + 1, counts[first]
        while last < len(tokens) and count + counts[last] <= room:
            count += counts[last]
            last += 1
        index = tokens[first]
        if last > first + 1:
            begin = np.arange(last - first) * scores.shape[-1]
            index = np.concatenate(tokens[first:last])
            index += np.repeat(begin, counts[first:last])
        yield Stretch(slice(first, last), index, counts[first:last])
        first = last


def alike(values: np.ndarray, old: Any) -> Any:
    """Return the values as an array or tensor of the same kind as `old`."""
    if isinstance(old, Tensor):
        return on_device(old.device, values, old.dtype)
    return values.astype(old.dtype)


def places(scores: Tensor, row: np.ndarray, token: np.ndarray) -> Tensor:
    """Return (C,) flat places of tokens in rows, (C,) both or of shapes that go together.

    Ids that no score belongs to are left out.
    """
    size = scores.shape[-1]
    index = row * size + token
    if token.size and (token.max() >= size or token.min() < 0):
        index = index[np.broadcast_to((token >= 0) & (token < size), index.shape)]
    return on_device(scores.device, index.reshape(-1))


def banned(scores: Tensor, row: np.ndarray, token: np.ndarray) -> Edit | None:
    """Return -inf at the given tokens of rows; None if there are none."""
    index = places(scores, row, token)
    return Edit(index, -math.inf) if len(index) else None


def banned_in(scores: Tensor, which: np.ndarray, tokens: tuple[int, ...]) -> Edit | None:
    """Return -inf at the same tokens of every row where `which`, (R,) bool, holds."""
    if not tokens or not which.any():
        return None
    return banned(scores, np.flatnonzero(which)[:, None], np.array(tokens))


def forced_in(scores: Tensor, which: np.ndarray, tokens: tuple[int, ...]) -> Edit | None:
    """Return 0 at the tokens and -inf elsewhere, in every row where `which`, (R,) bool, holds."""
    if not which.any():
        return None
    rows = np.flatnonzero(which)
    index = places(scores, rows[:, None], np.array(tokens, dtype=np.int64))
    return Edit(index, 0.0, on_device(scores.device, rows))
