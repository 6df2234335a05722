"""Processors that depend on how long the prefix is: when it may end, must end, must begin.

Lengths count visible ids, pad prefix included. A `prompt_length` of None is each row's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.processors.stacking import require
from everystep.types import Rows


def _set(scores: Tensor, which: np.ndarray, tokens: tuple[int, ...], value: float) -> Tensor:
    """Scores with `value` at the tokens, in the rows where `which` holds."""
    if not which.any():
        return scores
    row, token = np.meshgrid(np.flatnonzero(which), tokens, indexing="ij")
    return _put(scores, row, token, value)


def _put(scores: Tensor, row: np.ndarray, token: np.ndarray, value: float) -> Tensor:
    inside = token < scores.shape[-1]
    at = tuple(torch.from_numpy(part[inside]).to(scores.device) for part in (row, token))
    return scores.index_put(at, scores.new_tensor(value))


def _only(scores: Tensor, which: np.ndarray, tokens: tuple[int, ...]) -> Tensor:
    """Scores with 0 at the tokens and -inf elsewhere, in the rows where `which` holds."""
    if not which.any():
        return scores
    chosen = torch.from_numpy(which).to(scores.device)[:, None]
    return _set(scores.masked_fill(chosen, -math.inf), which, tokens, 0.0)


def _generated(rows: Rows, prompt_length: int | None) -> np.ndarray:
    """(R,) how many ids of each row follow its prompt."""
    if prompt_length is not None:
        return rows.lengths - prompt_length
    prompts = (sequence.request.prompt_visible for sequence in rows.sequences)
    return rows.lengths - np.fromiter(prompts, np.int64, len(rows))


@dataclass(frozen=True)
class MinLength:
    """No end token before the prefix holds `min_length` ids."""

    min_length: int
    eos: tuple[int, ...]

    def __post_init__(self) -> None:
        require(self.min_length >= 0, "min_length", "an integer of at least 0", self.min_length)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return _set(scores, rows.lengths < self.min_length, self.eos, -math.inf)


@dataclass(frozen=True)
class MinNewTokens:
    """No end token before `min_new_tokens` ids were generated."""

    min_new_tokens: int
    eos: tuple[int, ...]
    prompt_length: int | None = None

    def __post_init__(self) -> None:
        count = self.min_new_tokens
        require(count >= 0, "min_new_tokens", "an integer of at least 0", count)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        early = _generated(rows, self.prompt_length) < self.min_new_tokens
        return _set(scores, early, self.eos, -math.inf)


@dataclass(frozen=True)
class ForcedBOS:
    """Only `token` may follow a prefix of one id."""

    token: int

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return _only(scores, rows.lengths == 1, (self.token,))


@dataclass(frozen=True)
class ForcedEOS:
    """Only end tokens may stand at the last place of `max_length`."""

    max_length: int
    eos: tuple[int, ...]

    def __post_init__(self) -> None:
        require(min(self.eos, default=0) >= 0, "forced_eos_token_id", "ids from 0 on", self.eos)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return _only(scores, rows.lengths == self.max_length - 1, self.eos)


@dataclass(frozen=True)
class ExponentialDecayLength:
    """After `start` generated ids, ending gains |score| * (factor^n - 1) at the n-th further one.

    Source: ExponentialDecayLengthPenalty.
    """

    start: int
    factor: float
    eos: tuple[int, ...]
    prompt_length: int | None = None

    def __post_init__(self) -> None:
        name = "exponential_decay_length_penalty"
        require(min(self.eos, default=0) >= 0, name, "end token ids from 0 on", self.eos)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        beyond = _generated(rows, self.prompt_length) - self.start
        if not (beyond > 0).any():
            return scores
        gains = [[self._gain(int(n))] for n in beyond]
        eos = torch.tensor(self.eos, device=scores.device)
        ending = scores[:, eos]
        gained = torch.abs(ending) * scores.new_tensor(gains)
        gained = gained.masked_fill(~torch.isfinite(ending), 0.0)
        return scores.index_copy(1, eos, ending + gained)

    def _gain(self, n: int) -> float:
        if n <= 0:
            return 0.0
        try:
            return float(self.factor**n) - 1
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class SuppressTokens:
    """The tokens are never chosen."""

    tokens: tuple[int, ...]

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return _set(scores, np.ones(len(scores), dtype=bool), self.tokens, -math.inf)


@dataclass(frozen=True)
class SuppressTokensAtBegin:
    """The tokens are not chosen where `after` ids were generated.

    Where `begin_index` is given, it is that length of the prefix instead.
    """

    tokens: tuple[int, ...]
    after: int = 0
    begin_index: int | None = None

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        if self.begin_index is None:
            begins = _generated(rows, None) == self.after
        else:
            begins = rows.lengths == self.begin_index
        return _set(scores, begins, self.tokens, -math.inf)
