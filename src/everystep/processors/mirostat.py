"""Mirostat 2: a limit on surprise that follows the surprise of what was chosen.

What it remembers of a sequence cannot be read off the ids: the limit at each place, and the
surprises among which the tokens after the last places are being chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import FRACTION, POSITIVE, integer
from everystep.processors.base import LogitsProcessor
from everystep.processors.stacking import Counts, Numbers, admit, counts
from everystep.types import Rows

_KEY = "mirostat"


@dataclass(slots=True)
class _Limits:
    """Per length of the prefix: the limit there, and (V,) the surprise of each next token."""

    limit: dict[int, float] = field(default_factory=dict)
    surprise: dict[int, Tensor] = field(default_factory=dict)

    def copy(self) -> _Limits:
        """One that knows the same; the tensors are never changed."""
        return _Limits(self.limit.copy(), self.surprise.copy())

    def rewind(self, length: int) -> None:
        """What was known when the prefix had `length` ids."""
        for known in (self.limit, self.surprise):
            for place in [n for n in known if n > length]:
                del known[place]

    def forget(self, length: int) -> None:
        """What lies so far back that no choice can be taken back to it is gone."""
        for known in (self.limit, self.surprise):
            for place in [n for n in known if n < length]:
                del known[place]


@dataclass(frozen=True)
class Mirostat(LogitsProcessor):
    """Removes tokens whose surprise, in bits, is above a limit that seeks the mean surprise `tau`.

    The limit is 2 tau first; after a token of surprise s among those that were kept it falls by
    eta * (s - tau). A token that had been removed leaves it alone. The likeliest
    `min_tokens_to_keep` stay. By hand every call is a first one. Source: Basu et al. 2021, version
    2 as in llama.cpp.
    """

    tau: Numbers
    eta: Numbers = 0.1
    min_tokens_to_keep: Counts = 1

    per_row = ("tau", "eta", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "tau", POSITIVE, "mirostat_tau")
        admit(self, "eta", FRACTION, "mirostat_eta")
        admit(self, "min_tokens_to_keep", integer(1))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        surprise = -scores.log_softmax(dim=-1) / math.log(2)
        kept = torch.empty_like(scores)
        for wave in _waves(rows):
            # The rows of a wave follow drafts whose surprises the wave before has told.
            limits = torch.tensor([self._limit(rows, r) for r in wave], dtype=torch.float64)
            at = torch.from_numpy(wave).to(scores.device)
            far = surprise[at] > limits[:, None].to(scores)
            far &= ~self._spared(scores, at)
            kept[at] = scores[at].masked_fill(far, -math.inf)
            told = -kept[at].log_softmax(dim=-1) / math.log(2)
            for r, row in zip(wave, told, strict=True):
                _memory(rows, r).surprise[int(rows.lengths[r])] = row
        return kept

    def _spared(self, scores: Tensor, at: Tensor) -> Tensor:
        """(n, V) bool: the likeliest tokens of the given rows."""
        keep = counts(self.min_tokens_to_keep, scores)
        keep = keep[at] if isinstance(keep, Tensor) else torch.full((len(at), 1), keep)
        most = min(int(keep.max()), scores.shape[-1])
        best = torch.topk(scores[at], most, dim=-1).indices
        among = torch.arange(most, device=scores.device) < keep.to(scores.device)
        return torch.zeros_like(scores[at], dtype=torch.bool).scatter(-1, best, among)

    def _limit(self, rows: Rows, r: int) -> float:
        """The limit in row r, found from that of the id before where it is not known yet."""
        memory, length = _memory(rows, r), int(rows.lengths[r])
        tau, eta = _own(self.tau, r), _own(self.eta, r)
        memory.forget(rows.sequences[r].visible - rows.sequences[r].provisional - 1)
        if length not in memory.limit:
            limit = memory.limit.get(length - 1, 2 * tau)
            if length - 1 in memory.surprise:
                limit -= eta * _error(memory.surprise[length - 1], rows, r, tau)
            memory.limit[length] = limit
        return memory.limit[length]


def _error(surprise: Tensor, rows: Rows, r: int, tau: float) -> float:
    """By how much the surprise of row r's last id was above tau; 0 where it had been removed."""
    token = int(rows.table.data[rows.sequences[r].line, rows.lengths[r] - 1])
    told = float(surprise[token])
    return told - tau if math.isfinite(told) else 0.0


def _memory(rows: Rows, r: int) -> _Limits:
    memory: _Limits = rows.sequences[r].memo.setdefault(_KEY, _Limits())
    return memory


def _own(value: Numbers, r: int) -> float:
    return value[r] if isinstance(value, tuple) else value


def _waves(rows: Rows) -> list[np.ndarray]:
    """The rows in turns, each with at most one row of every sequence, shorter prefixes first."""
    rank: dict[int, int] = {}
    turn = np.empty(len(rows), dtype=np.int64)
    for r in np.argsort(rows.lengths, kind="stable"):
        turn[r] = rank.get(id(rows.sequences[r]), 0)
        rank[id(rows.sequences[r])] = int(turn[r]) + 1
    return [np.flatnonzero(turn == t) for t in range(int(turn.max(initial=-1)) + 1)]
