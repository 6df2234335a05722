"""Processors against repetition: what stands in the prefix, or in the prompt of the encoder.

Pad ids of the prefix count as the reference counts them: not for penalties, but for n-grams. Ids
beyond the width of the scores can never be chosen and are passed over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.processors.matching import matching_tails
from everystep.processors.stacking import column, require, stacked
from everystep.types import Rows


def penalised(scores: Tensor, penalty: float | Tensor) -> Tensor:
    """Scores times the penalty where they are negative, else divided by it."""
    return torch.where(scores < 0, scores * penalty, scores / penalty)


@dataclass(frozen=True)
class RepetitionPenalty:
    """Penalises every id that stands in the prefix (Keskar et al. 2019).

    `ignored`: how many ids at the start do not count; -1: each row's own pad prefix.
    """

    penalty: float | Tensor
    ignored: int | Tensor = -1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        require(self.penalty > 0, "repetition_penalty", "a number above 0", self.penalty)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids = rows.ids()
        place = torch.arange(ids.shape[1])
        counted = (place >= self._starts(rows)) & (place < _column_of(rows.lengths))
        return _penalise(ids, counted, scores, column(self.penalty, scores))

    def _starts(self, rows: Rows) -> Tensor:
        pads = torch.tensor([[s.request.pad_prefix] for s in rows.sequences])
        ignored = torch.as_tensor(self.ignored)
        return torch.where(ignored < 0, pads, ignored)


@dataclass(frozen=True)
class EncoderRepetitionPenalty:
    """Favours every id of the encoder's prompt: the penalty is taken as its reciprocal."""

    penalty: float
    encoder_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.penalty > 0, "encoder_repetition_penalty", "a number above 0", self.penalty)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids = torch.tensor(self.encoder_ids, dtype=torch.int64).expand(len(scores), -1)
        return _penalise(ids, torch.ones_like(ids, dtype=torch.bool), scores, 1 / self.penalty)


def _penalise(ids: Tensor, counted: Tensor, scores: Tensor, penalty: float | Tensor) -> Tensor:
    """Scores of the counted ids penalised once each; `ids`, `counted`: (R, T)."""
    size = scores.shape[-1]
    counted = counted & (ids < size)
    if bool(counted.all()):
        ids = ids.to(scores.device)
        return scores.scatter(1, ids, penalised(scores.gather(1, ids), penalty))
    # What does not count is sent to a column of its own behind the last.
    ids = torch.where(counted, ids, size).to(scores.device)
    padded = torch.nn.functional.pad(scores, (0, 1))
    return padded.scatter_(1, ids, penalised(padded.gather(1, ids), penalty))[:, :size]


@dataclass(frozen=True)
class NoRepeatNGram:
    """Bans every id that would complete an n-gram that the prefix already holds."""

    ngram_size: int

    def __post_init__(self) -> None:
        size = self.ngram_size
        require(size > 0, "no_repeat_ngram_size", "an integer above 0", size)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids, size = rows.ids().numpy(), self.ngram_size
        windows = ids.shape[1] - size + 1
        if windows <= 0:
            return scores
        match = np.arange(windows) + size <= rows.lengths[:, None]
        for k in range(size - 1):
            # The last size - 1 ids of a row, which the next one would follow.
            tail = np.maximum(rows.lengths - size + 1 + k, 0)[:, None]
            match &= ids[:, k : windows + k] == np.take_along_axis(ids, tail, axis=1)
        row, start = np.nonzero(match)
        return _ban(scores, row, ids[row, start + size - 1])


@dataclass(frozen=True)
class EncoderNoRepeatNGram:
    """Bans every id that would complete an n-gram of the encoder's prompt."""

    ngram_size: int
    encoder_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        size = self.ngram_size
        require(size > 0, "encoder_no_repeat_ngram_size", "an integer above 0", size)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        known = np.array(self.encoder_ids, dtype=np.int64)
        before = self.ngram_size - 1
        if len(known) <= before:
            return scores
        windows = np.lib.stride_tricks.sliding_window_view(known, self.ngram_size)
        ids = rows.ids().numpy()
        row, word = matching_tails(ids, rows.lengths, windows[:, :before])
        return _ban(scores, row, windows[word, before])


def _ban(scores: Tensor, row: np.ndarray, token: np.ndarray) -> Tensor:
    """Scores with -inf at the given places."""
    inside = token < scores.shape[-1]
    if not inside.any():
        return scores
    at = tuple(torch.from_numpy(part[inside]).to(scores.device) for part in (row, token))
    return scores.index_put(at, scores.new_tensor(-math.inf))


def _column_of(lengths: np.ndarray) -> Tensor:
    return torch.from_numpy(lengths)[:, None]
