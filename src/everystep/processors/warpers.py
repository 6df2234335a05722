"""Processors that shape the distribution before a draw: each looks at its own row of scores alone.

Every filter has `removed`, which says what it takes out; `filter_value` is put there. All their
numbers may be given per row.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from everystep.config.kinds import (
    BETWEEN_0_AND_1,
    FRACTION,
    FRACTION_ABOVE_0,
    POSITIVE,
    integer,
)
from everystep.processors.base import LogitsProcessor
from everystep.processors.stacking import (
    Counts,
    Numbers,
    admit,
    column,
    counts,
    greatest,
    larger,
)
from everystep.types import Rows

# Beyond this vocabulary a full sort is worth avoiding where few tokens are possible.
_SMALL = 4096
_FEW = 1024
_TOP_H_TOKENS = 100
_AT_LEAST_ONE = integer(1)


@dataclass(frozen=True)
class TemperatureLogitsWarper(LogitsProcessor):
    """scores / temperature."""

    temperature: Numbers

    per_row = ("temperature",)

    def __post_init__(self) -> None:
        admit(self, "temperature", POSITIVE, do="For greedy decoding set do_sample=False")

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return self._divide(scores, torch.empty_like(scores))

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        return self._divide(scores, scores)

    def _divide(self, scores: Tensor, out: Tensor) -> Tensor:
        divisor = column(self.temperature, scores)
        if isinstance(divisor, Tensor) and scores.is_cuda:
            # There torch divides by a number by multiplying with its reciprocal.
            return torch.mul(scores, divisor.reciprocal(), out=out)
        return torch.div(scores, divisor, out=out)


class Filter(LogitsProcessor):
    """Base of the processors that put `filter_value` where `removed` says so."""

    filter_value: float

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) scores -> (R, V) bool."""
        raise NotImplementedError

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return scores.masked_fill(self.removed(scores), self.filter_value)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        return scores.masked_fill_(self.removed(scores), self.filter_value)


@dataclass(frozen=True)
class TopKLogitsWarper(Filter):
    """Keeps the `top_k` highest scores, and all that equal the last of them."""

    top_k: Counts
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = ("top_k", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "top_k", _AT_LEAST_ONE)
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        return scores < _kth_highest(scores, larger(self.top_k, self.min_tokens_to_keep))


def _possible_in_order(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores in rising order and their tokens, (R, n) each: all that some row has not excluded."""
    count = int(torch.count_nonzero(scores > -math.inf, dim=-1).max())
    if count > _FEW:
        return torch.sort(scores, descending=False)
    best, tokens = torch.topk(scores, max(count, 1), dim=-1)
    return best.flip(-1), tokens.flip(-1)


@dataclass(frozen=True)
class TopPLogitsWarper(Filter):
    """Removes the lowest scores while their mass is at most 1 - top_p (Holtzman et al. 2020)."""

    top_p: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = ("top_p", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "top_p", FRACTION)
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        top_p = self.top_p
        spared = tuple(1 - p for p in top_p) if isinstance(top_p, tuple) else 1 - top_p
        if scores.shape[-1] <= _SMALL:
            ordered, tokens = torch.sort(scores, descending=False)
            low = ordered.softmax(dim=-1).cumsum(dim=-1) <= column(spared, scores)
        else:
            ordered, tokens = _possible_in_order(scores)
            # Summed one after another, so that tokens without mass change nothing if left out.
            mass = (ordered - ordered[:, -1:]).exp_().cumsum(dim=-1)
            low = mass <= column(spared, scores) * mass[:, -1:]
        _spare(low, self.min_tokens_to_keep, best_last=True)
        return torch.ones_like(scores, dtype=torch.bool).scatter_(1, tokens, low)


@dataclass(frozen=True)
class TopHLogitsWarper(Filter):
    """Keeps the best tokens, of the first 100, whose entropy is within `top_h` of the whole.

    Source: Potraghloo et al. 2025.
    """

    top_h: Numbers
    filter_value: float = -math.inf

    per_row = ("top_h",)

    def __post_init__(self) -> None:
        admit(self, "top_h", FRACTION_ABOVE_0)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        best, tokens = torch.topk(scores, min(_TOP_H_TOKENS, scores.shape[-1]), dim=-1)
        logs = _normalised(best)
        p = torch.softmax(logs, dim=-1)
        spent = torch.cumsum(-p * torch.log(p), dim=-1)
        kept = spent <= _entropy(logs, p) * column(self.top_h, scores)
        kept[:, 0] = True
        return torch.ones_like(scores, dtype=torch.bool).scatter(-1, tokens, ~kept)


@dataclass(frozen=True)
class MinPLogitsWarper(Filter):
    """Keeps what has at least `min_p` times the probability of the best (Nguyen et al. 2024)."""

    min_p: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = ("min_p", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "min_p", FRACTION)
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        p = torch.softmax(scores, dim=-1)
        low = p < column(self.min_p, scores) * p.amax(dim=-1, keepdim=True)
        if self.min_tokens_to_keep == 1:
            return low  # the best one never is
        most = min(greatest(self.min_tokens_to_keep), scores.shape[-1])
        best = torch.topk(p, most, dim=-1).indices
        spared = torch.arange(most, device=scores.device) < counts(self.min_tokens_to_keep, scores)
        return low.scatter(-1, best, low.gather(-1, best) & ~spared)


@dataclass(frozen=True)
class TypicalLogitsWarper(Filter):
    """Keeps the tokens of surprise nearest the entropy, up to `mass` (Meister et al. 2022)."""

    mass: Numbers = 0.9
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = ("mass", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "mass", BETWEEN_0_AND_1, "typical_p")
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        logs = torch.log_softmax(scores, dim=-1)
        entropy = -(logs * torch.exp(logs)).nansum(-1, keepdim=True)
        distance, tokens = torch.sort(torch.abs(-logs - entropy), descending=False)
        mass = scores.gather(-1, tokens).softmax(dim=-1).cumsum(dim=-1)
        last = (mass < column(self.mass, scores)).sum(dim=1, keepdim=True)
        far = distance > distance.gather(1, last.clamp_(max=scores.shape[-1] - 1))
        _spare(far, self.min_tokens_to_keep, best_last=False)
        return far.scatter(1, tokens, far)


@dataclass(frozen=True)
class EpsilonLogitsWarper(Filter):
    """Removes what has a probability below `epsilon` (Hewitt et al. 2022)."""

    epsilon: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = ("epsilon", "min_tokens_to_keep")

    def __post_init__(self) -> None:
        admit(self, "epsilon", BETWEEN_0_AND_1, "epsilon_cutoff")
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        low = scores.softmax(dim=-1) < column(self.epsilon, scores)
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))


@dataclass(frozen=True)
class EtaLogitsWarper(Filter):
    """Removes below min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022)."""

    epsilon: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1
    device: InitVar[str] = "cpu"

    per_row = ("epsilon", "min_tokens_to_keep")

    def __post_init__(self, device: str) -> None:
        admit(self, "epsilon", BETWEEN_0_AND_1, "eta_cutoff")
        admit(self, "min_tokens_to_keep", _AT_LEAST_ONE)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        logs = _normalised(scores)
        entropy = _entropy(logs, torch.softmax(logs, dim=-1))
        # float32 whatever the scores are, as in the reference.
        epsilon = torch.as_tensor(counts(self.epsilon, scores)).to(scores.device, torch.float32)
        low = scores.softmax(dim=-1) < torch.min(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))


@dataclass(frozen=True)
class LogitNormalization(LogitsProcessor):
    """log-softmax."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return scores.log_softmax(dim=-1)


def _normalised(scores: Tensor) -> Tensor:
    return scores - scores.logsumexp(dim=-1, keepdim=True)


def _entropy(logs: Tensor, p: Tensor) -> Tensor:
    """(R, 1), the terms of tokens without probability being 0."""
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)
    return -(finite * p).sum(-1, keepdim=True)


def _kth_highest(scores: Tensor, k: Counts) -> Tensor:
    """(R, 1) the k-th highest score of each row, or the lowest if there are fewer."""
    if k == 1:
        return scores.amax(dim=-1, keepdim=True)
    size = scores.shape[-1]
    best = torch.topk(scores, min(greatest(k), size)).values
    if isinstance(k, tuple):
        return best.gather(1, counts(k, scores).clamp(max=size) - 1)
    return best[..., -1, None]


def _spare(removed: Tensor, keep: Counts, *, best_last: bool) -> None:
    """Of the ordered (R, V) bool, the `keep` best places become False."""
    size = removed.shape[-1]
    if not isinstance(keep, tuple):
        best = slice(max(size - keep, 0), None) if best_last else slice(keep)
        removed[..., best] = False
        return
    place = torch.arange(size, device=removed.device)
    removed &= ((size - 1 - place) if best_last else place) >= counts(keep, removed)
