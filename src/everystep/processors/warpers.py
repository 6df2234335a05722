"""Processors that shape the distribution before a draw: each looks at its own row of scores alone.

Every filter has `removed`, which says what it takes out; being called, it puts -inf there. All can
be stacked. Sources are the reference's classes of the same names, with LogitsWarper appended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.processors.stacking import column, counts, require, stacked
from everystep.types import Rows

_TOP_H_TOKENS = 100


@dataclass(frozen=True)
class Temperature:
    """scores / temperature."""

    temperature: float | Tensor

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        do = "For greedy decoding set do_sample=False"
        require(self.temperature > 0, "temperature", "a number above 0", self.temperature, do)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        divisor = column(self.temperature, scores)
        if isinstance(divisor, Tensor) and scores.is_cuda:
            # There torch divides by a number by multiplying with its reciprocal.
            return scores * divisor.reciprocal()
        return scores / divisor


@dataclass(frozen=True)
class TopK:
    """Keeps the `top_k` highest scores, and all that equal the last of them."""

    top_k: int | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        require(self.top_k > 0, "top_k", "an integer above 0", self.top_k)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        return scores < _kth_highest(scores, _larger(self.top_k, self.min_tokens_to_keep))

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class TopP:
    """Removes the lowest scores while their mass is at most 1 - top_p (Holtzman et al. 2020)."""

    top_p: float | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        require(0 <= self.top_p <= 1, "top_p", "a number from 0 to 1", self.top_p)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        ordered, tokens = torch.sort(scores, descending=False)
        mass = ordered.softmax(dim=-1).cumsum(dim=-1)
        low = mass <= column(1 - self.top_p, scores)
        rank = torch.arange(scores.shape[-1], 0, -1, device=scores.device)  # 1 is the highest
        low &= rank > counts(self.min_tokens_to_keep, scores)
        return low.scatter(1, tokens, low)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class TopH:
    """Keeps the best tokens, of the first 100, whose entropy is within `top_h` of the whole.

    Source: Potraghloo et al. 2025.
    """

    top_h: float | Tensor

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        require(0 < self.top_h <= 1, "top_h", "a number above 0, at most 1", self.top_h)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        best, tokens = torch.topk(scores, min(_TOP_H_TOKENS, scores.shape[-1]), dim=-1)
        logs = _normalised(best)
        p = torch.softmax(logs, dim=-1)
        spent = torch.cumsum(-p * torch.log(p), dim=-1)
        kept = spent <= _entropy(logs, p) * column(self.top_h, scores)
        kept[:, 0] = True
        return torch.ones_like(scores, dtype=torch.bool).scatter(-1, tokens, ~kept)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class MinP:
    """Keeps what has at least `min_p` times the probability of the best (Nguyen et al. 2024)."""

    min_p: float | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        require(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1", self.min_p)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        p = torch.softmax(scores, dim=-1)
        low = p < column(self.min_p, scores) * p.amax(dim=-1, keepdim=True)
        keep = counts(self.min_tokens_to_keep, scores)
        most = min(_most(keep), scores.shape[-1])
        best = torch.topk(p, most, dim=-1).indices
        spared = torch.arange(most, device=scores.device) < keep
        return low.scatter(-1, best, low.gather(-1, best) & ~spared)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class Typical:
    """Keeps the tokens of surprise nearest the entropy, up to `mass` (Meister et al. 2022)."""

    mass: float | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        between = 0 < self.mass < 1
        require(between, "typical_p", "a number between 0 and 1, both excluded", self.mass)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        logs = torch.log_softmax(scores, dim=-1)
        entropy = -(logs * torch.exp(logs)).nansum(-1, keepdim=True)
        distance, tokens = torch.sort(torch.abs(-logs - entropy), descending=False)
        mass = scores.gather(-1, tokens).softmax(dim=-1).cumsum(dim=-1)
        last = (mass < column(self.mass, scores)).sum(dim=1, keepdim=True)
        far = distance > distance.gather(1, last.clamp_(max=scores.shape[-1] - 1))
        rank = torch.arange(scores.shape[-1], device=scores.device)
        far &= rank >= counts(self.min_tokens_to_keep, scores)
        return far.scatter(1, tokens, far)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class Epsilon:
    """Removes what has a probability below `epsilon` (Hewitt et al. 2022)."""

    epsilon: float | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        _require_cutoff("epsilon_cutoff", self.epsilon)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        low = scores.softmax(dim=-1) < column(self.epsilon, scores)
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class Eta:
    """As `Epsilon`, below min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022)."""

    epsilon: float | Tensor
    min_tokens_to_keep: int | Tensor = 1

    stack = classmethod(stacked)

    def __post_init__(self) -> None:
        _require_cutoff("eta_cutoff", self.epsilon)
        _require_keep(self.min_tokens_to_keep)

    def removed(self, scores: Tensor) -> Tensor:
        """(R, V) bool."""
        logs = _normalised(scores)
        entropy = _entropy(logs, torch.softmax(logs, dim=-1))
        # float32 whatever the scores are, as in the reference.
        epsilon = torch.as_tensor(self.epsilon, dtype=torch.float32, device=scores.device)
        low = scores.softmax(dim=-1) < torch.min(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.removed(scores), -math.inf)


@dataclass(frozen=True)
class LogitNormalization:
    """log-softmax."""

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.log_softmax(dim=-1)


def _normalised(scores: Tensor) -> Tensor:
    return scores - scores.logsumexp(dim=-1, keepdim=True)


def _entropy(logs: Tensor, p: Tensor) -> Tensor:
    """(R, 1), the terms of tokens without probability being 0."""
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)
    return -(finite * p).sum(-1, keepdim=True)


def _kth_highest(scores: Tensor, k: int | Tensor) -> Tensor:
    """(R, 1) the k-th highest score of each row, or the lowest if there are fewer."""
    size = scores.shape[-1]
    best = torch.topk(scores, min(_most(k), size)).values
    if isinstance(k, Tensor):
        return best.gather(1, k.to(scores.device).clamp(max=size) - 1)
    return best[..., -1, None]


def _most(k: int | Tensor) -> int:
    return int(k.max()) if isinstance(k, Tensor) else k


def _larger(first: int | Tensor, second: int | Tensor) -> int | Tensor:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.maximum(first, second)
    return max(first, second)


def _require_keep(count: int | Tensor) -> None:
    require(count >= 1, "min_tokens_to_keep", "an integer of at least 1", count)


def _require_cutoff(name: str, value: float | Tensor) -> None:
    require(0 < value < 1, name, "a number between 0 and 1, both excluded", value)
