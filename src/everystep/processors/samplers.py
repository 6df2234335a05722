"""Samplers beyond transformers': functions of a row of scores, of a drawn number (XTC), or of the
surprise of what was chosen before (Mirostat).

Each names its source. All their numbers may be given per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import FRACTION, NOT_NEGATIVE, POSITIVE
from everystep.devices import on_device
from everystep.processors.base import (
    Filter,
    LogitsProcessor,
    Narrowing,
    processed_lists,
    remembers,
)
from everystep.processors.stacking import LEAST_KEPT, Argument, Counts, Numbers, column, counts
from everystep.processors.warpers import but_for_best
from everystep.types import Rows, Scores
from everystep.types.request import places_of
from everystep.types.stored import remembered, stored


@dataclass(frozen=True)
class TopNSigma(Filter):
    """Keeps the scores within `n` standard deviations of the highest (Tang et al. 2024).

    The deviation is that of the row's finite scores, divided by their number.
    """

    n: Numbers
    filter_value: float = -math.inf

    per_row = (Argument("n", POSITIVE, "top_n_sigma"),)

    def removed(self, scores: Tensor) -> Tensor:
        finite = scores.isfinite()
        number = finite.sum(dim=-1, keepdim=True)
        mean = scores.masked_fill(~finite, 0).sum(dim=-1, keepdim=True) / number
        squares = (scores - mean).masked_fill(~finite, 0).square()
        sigma = (squares.sum(dim=-1, keepdim=True) / number).sqrt()
        return scores < scores.amax(dim=-1, keepdim=True) - column(self.n, scores) * sigma


@dataclass(frozen=True)
class DynamicTemperature(Narrowing):
    """scores / T, with T between temperature - spread and temperature + spread by the entropy.

    T = low + (high - low) * (H / log n) ** exponent, H the entropy of the n tokens that have a
    finite score; unchanged where n is 1. Source: kalomaze 2023, as in llama.cpp.
    """

    temperature: Numbers
    spread: Numbers
    exponent: Numbers = 1.0

    per_row = (
        Argument("temperature", POSITIVE),
        Argument("spread", NOT_NEGATIVE, "dynatemp_range"),
        Argument("exponent", POSITIVE, "dynatemp_exponent"),
    )
    keeps_lists = True

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        middle, spread = column(self.temperature, scores), column(self.spread, scores)
        logs = scores.log_softmax(dim=-1)
        entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1, keepdim=True)
        number = scores.isfinite().sum(dim=-1, keepdim=True).to(scores)
        share = (entropy / number.log()).clamp(0, 1)
        heat = middle - spread + 2 * spread * share ** column(self.exponent, scores)
        return torch.where(number > 1, scores / heat, scores)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        return processed_lists(self, rows, scores)


@dataclass(frozen=True)
class Xtc(Narrowing):
    """With the given probability, removes all tokens of p >= threshold but the least likely one.

    Tokens that equal it stay with it, and all stay where fewer than `min_tokens_to_keep` would be
    left. Whether it strikes is one number per row of the stream "xtc": with a seed a function of
    (seed, sequence, position), without one the next numbers of torch's global generator, in the
    order of the step's rows. Source: p-e-w 2024, text-generation-webui pull request 6335.
    """

    probability: Numbers
    threshold: Numbers = 0.1
    min_tokens_to_keep: Counts = 1

    per_row = (
        Argument("probability", FRACTION, "xtc_probability"),
        Argument("threshold", FRACTION, "xtc_threshold"),
        LEAST_KEPT,
    )
    keeps_lists = True

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        strikes = on_device(scores.device, _numbers(rows)) < column(self.probability, scores)
        return scores.masked_fill(self.removed(scores) & strikes, -math.inf)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        return processed_lists(self, rows, scores)

    def removed(self, scores: Tensor) -> Tensor:
        """Return (R, V) bool: what goes where it strikes."""
        p = scores.softmax(dim=-1)
        above = p >= column(self.threshold, scores)
        least = p.masked_fill(~above, math.inf).amin(dim=-1, keepdim=True)
        top = above & (p > least)
        left = (scores.isfinite() & ~top).sum(dim=-1, keepdim=True)
        return top & (left >= counts(self.min_tokens_to_keep, scores))


def _numbers(rows: Rows) -> Tensor:
    """Return (R, 1) what decides whether XTC strikes in each row."""
    sequences, draws = rows.sequences, rows.sequences[0].request.draws
    if not remembers(rows):  # rows of a call by hand
        return torch.rand(len(rows), 1, dtype=torch.float64)
    shifts = np.fromiter((one.request.shift for one in sequences), np.int64, len(rows))
    slots = np.arange(len(rows))
    places = places_of(sequences, rows.lengths - shifts, slots, len(rows))
    return draws.uniform("xtc", places)


@stored("mirostat")
class _Choice(NamedTuple):
    """The limit where the prefix has `length` ids, and the surprises (n,) of the kept `tokens`,
    which rise."""

    length: int
    limit: float
    tokens: np.ndarray
    surprises: np.ndarray

    def error(self, token: int, tau: float) -> float:
        """Return how far the chosen token's surprise was above tau; 0 where it was removed."""
        place = int(np.searchsorted(self.tokens, token))
        kept = place < len(self.tokens) and self.tokens[place] == token
        return float(self.surprises[place]) - tau if kept else 0.0


_KEY = remembered("mirostat", tuple[_Choice, ...])


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

    per_row = (
        Argument("tau", POSITIVE, "mirostat_tau"),
        Argument("eta", FRACTION, "mirostat_eta"),
        LEAST_KEPT,
    )

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        surprise = -scores.log_softmax(dim=-1) / math.log(2)
        kept = torch.empty_like(scores)
        for wave in _waves(rows):
            # The rows of a wave follow drafts whose surprises the previous wave has found.
            found = [self._limit(rows, r) for r in wave.tolist()]
            limits = torch.tensor(found, dtype=torch.float64)
            at = on_device(scores.device, wave)
            far = surprise[at] > limits[:, None].to(scores)
            least = self.min_tokens_to_keep
            least = tuple(least[r] for r in wave) if isinstance(least, tuple) else least
            far = but_for_best(far, scores[at], least)
            kept[at] = scores[at].masked_fill(far, -math.inf)
            left = -kept[at].log_softmax(dim=-1) / math.log(2)
            for r, limit, row in zip(wave.tolist(), found, left.cpu().numpy(), strict=True):
                tokens = np.flatnonzero(np.isfinite(row))
                _note(rows, r, _Choice(int(rows.lengths[r]), limit, tokens, row[tokens]))
        return kept

    def _limit(self, rows: Rows, r: int) -> float:
        """Return the limit in row r, from that of the previous id."""
        tau, eta = _own(self.tau, r), _own(self.eta, r)
        sequence, length = rows.sequences[r], int(rows.lengths[r])
        choices = sequence.memo.get(_KEY, ())
        before = next((one for one in choices if one.length == length - 1), None)
        if before is None:
            return 2 * tau
        token = int(rows.table.data[sequence.line, length - 1])
        return before.limit - eta * before.error(token, tau)


def _note(rows: Rows, r: int, choice: _Choice) -> None:
    """Let the sequence remember the choice, and those before it that it may be taken back to."""
    sequence = rows.sequences[r]
    first = sequence.visible - sequence.provisional - 1
    kept = (one for one in sequence.memo.get(_KEY, ()) if first <= one.length < choice.length)
    sequence.memo[_KEY] = (*kept, choice)


def _own(value: Numbers, r: int) -> float:
    return value[r] if isinstance(value, tuple) else value


def _waves(rows: Rows) -> list[np.ndarray]:
    """Return the rows in turns, each with at most one row of a sequence, shorter prefixes first."""
    rank: dict[int, int] = {}
    turn = np.empty(len(rows), dtype=np.int64)
    for r in np.argsort(rows.lengths, kind="stable"):
        turn[r] = rank.get(id(rows.sequences[r]), 0)
        rank[id(rows.sequences[r])] = int(turn[r]) + 1
    return [np.flatnonzero(turn == t) for t in range(int(turn.max(initial=-1)) + 1)]
