"""Processors that shape the distribution before a draw: each looks at its own row of scores alone.

Every filter has `removed`, which says what it takes out; `filter_value` is put there. All their
numbers may be given per row.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import BETWEEN_0_AND_1, FRACTION, FRACTION_ABOVE_0, POSITIVE, SIZE
from everystep.devices import on_device
from everystep.draws import weights
from everystep.processors.base import Filter, Narrowing, processed_lists
from everystep.processors.best import (
    above,
    best_of,
    beyond_mass,
    block_highest,
    is_wide,
    total_weight,
    without,
)
from everystep.processors.stacking import (
    LEAST_KEPT,
    Argument,
    Counts,
    Numbers,
    column,
    counts,
    greatest,
    larger,
)
from everystep.types import Rows, Scores

# Among so many of the best tokens most of the mass is looked for first, and found with some room.
_LIKELY = 128
_ROUNDING = 1e-9
# By how much a threshold found in another way may lie too high.
_ROOM = 1e-3
_TOP_H_TOKENS = 100


@dataclass(frozen=True)
class TemperatureLogitsWarper(Narrowing):
    """scores / temperature."""

    temperature: Numbers

    per_row = (Argument("temperature", POSITIVE, do="For greedy decoding set do_sample=False"),)
    reads_ids = False
    keeps_lists = True

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return self._divide(scores, None if scores.requires_grad else torch.empty_like(scores))

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        return None if scores.tokens is None else scores.changed(self._cooled)

    def _cooled(self, values: Tensor, which: Any) -> Tensor:
        """Return (n, m) values of some of the rows, divided."""
        divisor = column(self.temperature, values)
        return values / (divisor[which] if isinstance(divisor, Tensor) else divisor)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        return self._divide(scores, scores)

    def _divide(self, scores: Tensor, out: Tensor | None) -> Tensor:
        divisor = column(self.temperature, scores)
        if isinstance(divisor, Tensor) and scores.is_cuda:
            # There torch divides by a number by multiplying with its reciprocal.
            return torch.mul(scores, divisor.reciprocal(), out=out)
        return torch.div(scores, divisor, out=out)


@dataclass(frozen=True)
class TopKLogitsWarper(Filter):
    """Keeps the `top_k` highest scores, and all that equal the last of them."""

    top_k: Counts
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = (Argument("top_k", SIZE), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
        return scores < _kth_highest(scores, self._number)

    @property
    def best(self) -> int:
        """The number of best scores of a row that decide what it leaves.

        It is one more than it keeps, which shows whether a tie goes on.
        """
        return 1 + greatest(self._number)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        known = scores.tokens is not None or is_wide(scores.values)
        return best_of(scores, self._number, temperature) if self.keeps_lists and known else None

    @property
    def _number(self) -> Counts:
        """The number of tokens that it keeps where there are no ties."""
        return larger(self.top_k, self.min_tokens_to_keep)


@dataclass(frozen=True)
class TopPLogitsWarper(Filter):
    """Removes the lowest scores while their mass is at most 1 - top_p (Holtzman et al. 2020).

    Which of equal scores go first is torch's choice in a narrow row; in a wide one lower ids do.
    """

    top_p: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = (Argument("top_p", FRACTION), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
        top_p = self.top_p
        spared = tuple(1 - p for p in top_p) if isinstance(top_p, tuple) else 1 - top_p
        ordered, tokens = torch.sort(scores, descending=False)
        low = ordered.softmax(dim=-1).cumsum(dim=-1) <= column(spared, scores)
        _spare(low, self.min_tokens_to_keep, best_last=True)
        return low.scatter(1, tokens, low)

    def removed_of_many(self, scores: Tensor) -> Tensor:
        keep = np.asarray(self.min_tokens_to_keep)[..., None]
        return torch.from_numpy(beyond_mass(scores.numpy(), self._share, keep))

    def searched(self, scores: Scores, temperature: Numbers) -> Scores | None:
        """Return the tokens that it keeps, where they are among the best few of every row."""
        values = scores.values
        if temperature != 1.0:
            values = values / column(temperature, values)
        found = best_of(Scores.of(values), larger(_LIKELY, self.min_tokens_to_keep))
        if found is None:
            return None
        listed, whole = found.values.numpy(), total_weight(values.numpy())
        if not (total_weight(listed) > self._share * whole * (1 + _ROUNDING)).all():
            return None
        keep = np.asarray(self.min_tokens_to_keep)[..., None]
        return without(found, torch.from_numpy(beyond_mass(listed, self._share, keep, whole)))

    @property
    def _share(self) -> np.ndarray:
        """top_p, of all rows or (R, 1)."""
        return np.asarray(self.top_p, dtype=np.float64)[..., None]


@dataclass(frozen=True)
class TopHLogitsWarper(Filter):
    """Keeps the best tokens, of the first 100, whose entropy is within `top_h` of the whole.

    Source: Potraghloo et al. 2025.
    """

    top_h: Numbers
    filter_value: float = -math.inf

    per_row = (Argument("top_h", FRACTION_ABOVE_0),)

    def removed(self, scores: Tensor) -> Tensor:
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

    per_row = (Argument("min_p", FRACTION), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
        p = torch.softmax(scores, dim=-1)
        return self._low(p, column(self.min_p, scores) * p.amax(dim=-1, keepdim=True))

    def removed_of_many(self, scores: Tensor) -> Tensor:
        return self._low(torch.from_numpy(weights(scores.numpy())), column(self.min_p, scores))

    def _low(self, p: Tensor, least: Any) -> Tensor:
        keep = self.min_tokens_to_keep  # if one, the best is never low
        return p < least if keep == 1 else but_for_best(p < least, p, keep)

    def searched(self, scores: Scores, temperature: Numbers) -> Scores | None:
        """Return the tokens that it keeps, where those are few."""
        if self.min_tokens_to_keep != 1:
            return None
        highest = block_highest(scores, temperature)
        best = highest.max(axis=1, keepdims=True).astype(np.float64)
        with np.errstate(divide="ignore"):
            lowest = best + np.log(np.asarray(self.min_p, dtype=np.float64)[..., None])
        found = above(scores, temperature, highest, lowest - _ROOM * (1 + abs(best)))
        return None if found is None else without(found, self.removed_of_many(found.values))


@dataclass(frozen=True)
class TypicalLogitsWarper(Filter):
    """Keeps the tokens of surprise nearest the entropy, up to `mass` (Meister et al. 2022)."""

    mass: Numbers = 0.9
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1

    per_row = (Argument("mass", BETWEEN_0_AND_1, "typical_p"), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
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

    per_row = (Argument("epsilon", BETWEEN_0_AND_1, "epsilon_cutoff"), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
        low = scores.softmax(dim=-1) < column(self.epsilon, scores)
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))


@dataclass(frozen=True)
class EtaLogitsWarper(Filter):
    """Removes below min(epsilon, sqrt(epsilon) exp(-entropy)) (Hewitt et al. 2022)."""

    epsilon: Numbers
    filter_value: float = -math.inf
    min_tokens_to_keep: Counts = 1
    device: InitVar[str] = "cpu"

    per_row = (Argument("epsilon", BETWEEN_0_AND_1, "eta_cutoff"), LEAST_KEPT)

    def removed(self, scores: Tensor) -> Tensor:
        logs = _normalised(scores)
        entropy = _entropy(logs, torch.softmax(logs, dim=-1))
        # float32 whatever the scores are, as in transformers.
        epsilon = on_device(
            scores.device, torch.as_tensor(counts(self.epsilon, scores)), torch.float32
        )
        low = scores.softmax(dim=-1) < torch.min(epsilon, epsilon.sqrt() * torch.exp(-entropy))
        return low & (scores < _kth_highest(scores, self.min_tokens_to_keep))


@dataclass(frozen=True)
class LogitNormalization(Narrowing):
    """log-softmax."""

    reads_ids = False
    keeps_lists = True

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        return scores.log_softmax(dim=-1)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        return processed_lists(self, rows, scores)


def _normalised(scores: Tensor) -> Tensor:
    return scores - scores.logsumexp(dim=-1, keepdim=True)


def _entropy(logs: Tensor, p: Tensor) -> Tensor:
    """Return (R, 1), the terms of tokens without probability being 0."""
    finite = logs.clamp(min=torch.finfo(logs.dtype).min)
    return -(finite * p).sum(-1, keepdim=True)


def _kth_highest(scores: Tensor, k: Counts) -> Tensor:
    """Return (R, 1) the k-th highest score of each row, or the lowest if there are fewer."""
    if k == 1:
        return scores.amax(dim=-1, keepdim=True)
    size = scores.shape[-1]
    best = torch.topk(scores, min(greatest(k), size)).values
    if isinstance(k, tuple):
        return best.gather(1, counts(k, scores).clamp(max=size) - 1)
    return best[..., -1, None]


def but_for_best(removed: Tensor, scores: Tensor, keep: Counts) -> Tensor:
    """Return (R, V) bool: what is removed, but for the `keep` best tokens of every row.

    Which of equal ones are kept is as in transformers, where it depends on `keep`; so it is found
    for each number apart, and no row depends on how many another keeps.
    """
    if not isinstance(keep, tuple):
        best = torch.topk(scores, min(keep, scores.shape[-1]), dim=-1).indices
        return removed.scatter(-1, best, value=False)
    found = removed.clone()
    for count in sorted(set(keep)):
        own = on_device(scores.device, np.flatnonzero(np.array(keep) == count))
        found[own] = but_for_best(removed[own], scores[own], count)
    return found


def _spare(removed: Tensor, keep: Counts, *, best_last: bool) -> None:
    """Let the `keep` best places of the ordered (R, V) bool become False."""
    size = removed.shape[-1]
    if not isinstance(keep, tuple):
        best = slice(max(size - keep, 0), None) if best_last else slice(keep)
        removed[..., best] = False
        return
    place = torch.arange(size, device=removed.device)
    removed &= ((size - 1 - place) if best_last else place) >= counts(keep, removed)
