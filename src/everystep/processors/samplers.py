"""Samplers beyond the reference's that need nothing but a row of scores, and for XTC a number.

Each names its source. All their numbers may be given per row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import FRACTION, NOT_NEGATIVE, POSITIVE, integer
from everystep.draws import places_of
from everystep.processors.base import Filter, LogitsProcessor
from everystep.processors.stacking import Counts, Numbers, admit, column, counts
from everystep.types import Rows, Scores


@dataclass(frozen=True)
class TopNSigma(Filter):
    """Keeps the scores within `n` standard deviations of the highest (Tang et al. 2024).

    The deviation is that of the row's finite scores, divided by their number.
    """

    n: Numbers
    filter_value: float = -math.inf

    per_row = ("n",)

    def __post_init__(self) -> None:
        admit(self, "n", POSITIVE, "top_n_sigma")

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        finite = scores.isfinite()
        number = finite.sum(dim=-1, keepdim=True)
        mean = scores.masked_fill(~finite, 0).sum(dim=-1, keepdim=True) / number
        squares = (scores - mean).masked_fill(~finite, 0).square()
        sigma = (squares.sum(dim=-1, keepdim=True) / number).sqrt()
        return scores < scores.amax(dim=-1, keepdim=True) - column(self.n, scores) * sigma


@dataclass(frozen=True)
class DynamicTemperature(LogitsProcessor):
    """scores / T, with T between temperature - spread and temperature + spread by the entropy.

    T = low + (high - low) * (H / log n) ** exponent, H the entropy of the n tokens that have a
    finite score; unchanged where n is 1. Source: kalomaze 2023, as in llama.cpp.
    """

    temperature: Numbers
    spread: Numbers
    exponent: Numbers = 1.0

    per_row = ("temperature", "spread", "exponent")
    narrows = True

    def __post_init__(self) -> None:
        admit(self, "temperature", POSITIVE)
        admit(self, "spread", NOT_NEGATIVE, "dynatemp_range")
        admit(self, "exponent", POSITIVE, "dynatemp_exponent")

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        middle, spread = column(self.temperature, scores), column(self.spread, scores)
        logs = scores.log_softmax(dim=-1)
        entropy = -(logs.exp() * logs.clamp(min=torch.finfo(logs.dtype).min)).sum(-1, keepdim=True)
        number = scores.isfinite().sum(dim=-1, keepdim=True).to(scores)
        share = (entropy / number.log()).clamp(0, 1)
        heat = middle - spread + 2 * spread * share ** column(self.exponent, scores)
        return torch.where(number > 1, scores / heat, scores)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """The same tokens of a list."""
        return self.relisted(rows, scores)


@dataclass(frozen=True)
class Xtc(LogitsProcessor):
    """With the given probability, removes all tokens of p >= threshold but the least likely one.

    Tokens that equal it stay with it, and all stay where fewer than `min_tokens_to_keep` would be
    left. Whether it strikes is one number per row of the stream "xtc": with a seed a function of
    (seed, sequence, position), without one the next numbers of torch's global generator, in the
    order of the step's rows. Source: p-e-w 2024, text-generation-webui pull request 6335.
    """

    probability: Numbers
    threshold: Numbers = 0.1
    min_tokens_to_keep: Counts = 1

    per_row = ("probability", "threshold", "min_tokens_to_keep")
    narrows = True

    def __post_init__(self) -> None:
        admit(self, "probability", FRACTION, "xtc_probability")
        admit(self, "threshold", FRACTION, "xtc_threshold")
        admit(self, "min_tokens_to_keep", integer(1))

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        strikes = _numbers(rows).to(scores.device) < column(self.probability, scores)
        return scores.masked_fill(self.removed(scores) & strikes, -math.inf)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """The same tokens of a list, of which some have no score any more."""
        return self.relisted(rows, scores)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool: what goes where it strikes."""
        p = scores.softmax(dim=-1)
        above = p >= column(self.threshold, scores)
        least = p.masked_fill(~above, math.inf).amin(dim=-1, keepdim=True)
        top = above & (p > least)
        left = (scores.isfinite() & ~top).sum(dim=-1, keepdim=True)
        return top & (left >= counts(self.min_tokens_to_keep, scores))


def _numbers(rows: Rows) -> Tensor:
    """(R, 1) what decides whether XTC strikes in each row."""
    sequences, draws = rows.sequences, rows.sequences[0].request.draws
    if draws is None:
        return torch.rand(len(rows), 1, dtype=torch.float64)
    prompts = np.fromiter((one.request.prompt_visible for one in sequences), np.int64, len(rows))
    slots = np.arange(len(rows))
    places = places_of(sequences, rows.lengths - prompts, slots, len(rows))
    numbers: Tensor = draws.uniform("xtc", places)
    return numbers
