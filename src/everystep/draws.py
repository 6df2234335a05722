"""Where randomness comes from: the global generator, or a hash of where the choice stands.

Strategies see draws only. `SharedDraws` consumes torch's global generator as transformers does,
over the full rectangle of the call. `SeededDraws` keys every number by (seed, stream, lineage,
position), so that a choice depends on nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device, on_host
from everystep.errors import RequestError, shown
from everystep.types import Scores
from everystep.types.draw_places import Places

_STREAMS = {"choice": 1, "accept": 2, "residual": 3, "draft": 4, "xtc": 5, "fork": 6, "prompt": 7}
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(value: np.ndarray) -> np.ndarray:
    """Apply the finaliser of splitmix64 (Steele et al. 2014), element by element, modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


@lru_cache(maxsize=2**14)
def _key(seed: int, stream: str, lineage: int) -> int:
    """Return the key that all numbers of one sequence's stream begin with."""
    key = mix_one(mix_one(seed + int(_GOLDEN)) + _STREAMS[stream] * int(_GOLDEN))
    return mix_one(key ^ mix_one(lineage + int(_GOLDEN)))


def uniform(
    seed: np.ndarray, stream: str, lineage: np.ndarray, position: np.ndarray, n: int = 1
) -> np.ndarray:
    """Return (R, n) float64 in (0, 1), a function of the arguments alone; R seeds, lineages, ..."""
    rows = zip(seed.tolist(), lineage.tolist(), strict=True)
    keys = np.array([_key(one, stream, own) for one, own in rows], dtype=np.uint64)
    keys = mix(keys + position.astype(np.uint64) * _GOLDEN + _GOLDEN)
    bits = mix(keys[:, None] + np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def seed_of(seed: int, index: int) -> int:
    """Return the seed of prompt `index` of several that share one; the first one's is itself."""
    if index == 0:
        return seed
    return mix_one(mix_one(seed + _STREAMS["prompt"] * int(_GOLDEN)) + index * int(_GOLDEN))


def fork_lineage(lineage: int, position: int, rank: int) -> int:
    """Return the lineage of a further child: new for every (parent, position, rank)."""
    key = mix_one(lineage + _STREAMS["fork"] * int(_GOLDEN))
    key = mix_one((key ^ position) + int(_GOLDEN))
    return mix_one((key ^ rank) + int(_GOLDEN))


def mix_one(value: int) -> int:
    """Do `mix` for one Python integer, for the many single forks of a beam search."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * int(_MIX_1)) & _MASK
    value = ((value ^ (value >> 27)) * int(_MIX_2)) & _MASK
    return value ^ (value >> 31)


# Beyond this vocabulary weights are summed in blocks first.
_SMALL = 4096
_BLOCK = 64
_CACHED = 2**16  # weights that are made and summed at once, so that they stay in the cache


def _possible(drawn: Tensor, probabilities: Tensor) -> Tensor:
    """Return (R, n) indices, -1 in rows of nan: a softmax that is nan at all is nan everywhere."""
    return torch.where(probabilities[:, :1].isnan(), -1, drawn)


def weights(scores: np.ndarray) -> np.ndarray:
    """Return (R, n) exp(score - highest); nan in a row without any finite score or with nan.

    A token's weight does not depend on where it stands, as it may with torch's exp.
    """
    with np.errstate(invalid="ignore"):
        powers: np.ndarray = scores - scores.max(axis=-1, keepdims=True)
    return np.exp(powers, out=powers)


def _drawn(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return (R,) where numbers (R, 1) in (0, 1) fall among the summed weights of scores (R, n)."""
    if not on_host(scores):
        power = (scores - scores.amax(dim=-1, keepdim=True)).double().exp()
        drawn = _reached_on_device(power.cumsum(dim=-1), on_device(scores.device, numbers))
        return _possible(drawn, power)[:, 0]
    array = scores.numpy()
    if scores.shape[-1] <= _SMALL:
        cumulative = weights(array).cumsum(axis=-1, dtype=np.float64)
        place = _reached(cumulative, numbers.numpy())
        return torch.from_numpy(np.where(np.isnan(cumulative[:, -1]), -1, place))
    step = max(_CACHED // scores.shape[-1], 1)
    parts = [slice(first, first + step) for first in range(0, len(array), step)]
    blocks = [_reached_in_blocks(weights(array[part]), numbers.numpy()[part]) for part in parts]
    return torch.from_numpy(np.concatenate(blocks))


_AHEAD = 64  # how many tokens may be among the first to come


def _first_to_come(rates: Tensor, noise: Tensor, count: int) -> Tensor:
    """Return (R, count) the tokens of the shortest waiting times, in order.

    A time is -log(u) / rate of one of (R, V) numbers u. The order is that of log rate - log(-log
    u), the keys of Gumbel top-k. As -log(u) is at least 1 - u, most tokens are out without a
    logarithm.
    """
    if count < _AHEAD < rates.shape[1] // 2 and on_host(rates):
        bounds, likely = torch.topk(rates / (1 - noise), _AHEAD)
        keys = rates.gather(1, likely) / -noise.gather(1, likely).log()
        best, places = torch.topk(keys, count)
        if bool((best[:, -1] > 1.001 * bounds[:, -1]).all()):
            return likely.gather(1, places)
    return torch.topk(rates / -noise.log(), count).indices


def _reached(cumulative: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return (R,) the first place at which sums (R, n) exceed shares (R, 1) of the last one."""
    total = cumulative[:, -1:]
    index = (cumulative <= numbers * total).sum(axis=1)
    # Rounding may reach the end: the last place that adds anything is the answer then.
    return np.minimum(index, (cumulative < total).sum(axis=1))


def _reached_on_device(cumulative: Tensor, numbers: Tensor) -> Tensor:
    """Do as `_reached`, (R, 1), without a wait."""
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, numbers * total, right=True)
    return torch.minimum(index, torch.searchsorted(cumulative, total))


def _reached_in_blocks(weight: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Do as `_reached`, (R,), for weights (R, V): find the block, then the place; -1 for nan."""
    begin = np.arange(0, weight.shape[1], _BLOCK)
    sums = np.add.reduceat(weight, begin, axis=1, dtype=np.float64).cumsum(axis=1)
    wanted, total = numbers * sums[:, -1:], sums[:, -1:]
    block = _reached(sums, numbers)
    drawn = np.full(len(weight), -1)
    for r in np.flatnonzero(~np.isnan(total[:, 0])):
        first = begin[block[r]]
        inside = weight[r, first : first + _BLOCK].cumsum(dtype=np.float64)
        rest = wanted[r, 0] - (sums[r, block[r] - 1] if block[r] else 0.0)
        place = np.searchsorted(inside, rest, side="right")
        drawn[r] = first + min(place, np.searchsorted(inside, inside[-1]))
    return drawn


@dataclass(frozen=True)
class SharedDraws:
    """Draws what transformers draws from torch's global generator.

    `torch.multinomial` equals argmax(p / q) and, without replacement, topk(p / q), where q is
    exponential noise over all rows of the call; rows that left the batch keep their share of it.
    """

    seed: ClassVar[int] = 0
    whole_rows: ClassVar[bool] = True

    def choose(self, scores: Scores, places: Places) -> Tensor:
        # All tokens take part in the sum, in the order in which transformers adds them up.
        probabilities = torch.softmax(scores.whole().values, dim=-1)
        chosen = (probabilities / self._noise(probabilities, places)).argmax(dim=-1)
        return _possible(chosen[:, None], probabilities)[:, 0]

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        drawn = torch.topk(probabilities / self._noise(probabilities, places), count).indices
        return _possible(drawn, probabilities)

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        # transformers accepts drafts by numbers of this type.
        kind = torch.float32 if stream == "accept" else torch.float64
        drawn = torch.rand(places.slots, n, dtype=kind)
        return drawn[torch.from_numpy(places.slot)]

    def beside(self, stream: str) -> SharedDraws:
        return self

    def _noise(self, probabilities: Tensor, places: Places) -> Tensor:
        full = probabilities.new_empty(places.slots, probabilities.shape[1]).exponential_()
        if len(places.slot) == places.slots and (places.slot == np.arange(places.slots)).all():
            return full
        return full[on_device(full.device, places.slot)]


@dataclass(frozen=True)
class SeededDraws:
    """Draws that depend on (seed, stream, lineage, position) alone.

    Rows of several requests are drawn in one call: the seeds come with the places. `stream`: that
    of the choices.
    """

    seed: int
    stream: str = field(default="choice", repr=False)
    whole_rows: ClassVar[bool] = False

    def choose(self, scores: Scores, places: Places) -> Tensor:
        """Choose by the inverse of the cumulative distribution, so one number makes one choice."""
        numbers = self.uniform(self.stream, places)
        if not scores.listed or scores.tokens is None:
            return _drawn(scores.whole().values, numbers)
        place = _drawn(scores.values, numbers).numpy()
        token = scores.tokens.numpy()[np.arange(len(place)), place]
        return torch.from_numpy(np.where(place < 0, -1, token))

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        """Choose by Gumbel top-k (Kool et al. 2019); the numbers are keyed by token, not rank."""
        drawn = self.uniform(self.stream, places, probabilities.shape[1])
        noise = on_device(probabilities.device, drawn)
        return _possible(_first_to_come(probabilities.double(), noise, count), probabilities)

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        return torch.from_numpy(uniform(places.seed, stream, places.lineage, places.position, n))

    def beside(self, stream: str) -> SeededDraws:
        return SeededDraws(self.seed, stream)


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Start the global generators of Python, numpy and torch anew from `seed`.

    Draws without `seed=` come from torch's. `deterministic`: torch chooses algorithms that repeat.
    Source: transformers' `set_seed`.

    Example:

        >>> es.set_seed(4)
        >>> text = es.generate(model, tokenizer, "Once", do_sample=True, max_new_tokens=3)
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise RequestError(
            "seed is impossible", wanted="an integer from 0 to 2**32 - 1", got=shown(seed)
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # on every device
    if deterministic:
        torch.use_deterministic_algorithms(True)
