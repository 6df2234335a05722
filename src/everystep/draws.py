"""Where randomness comes from: the global generator, or a hash of where the choice stands.

Strategies see draws only. `SharedDraws` consumes torch's global generator as the reference does,
over the full rectangle of the call. `SeededDraws` keys every number by (seed, stream, lineage,
position), so that a choice depends on nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.types import Sequence

_STREAMS = {"choice": 1, "accept": 2, "residual": 3, "draft": 4, "xtc": 5, "fork": 6}
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014), element by element, modulo 2^64."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def _key(seed: np.ndarray, stream: str, lineage: np.ndarray, position: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        head = _mix(np.asarray(seed).astype(np.uint64) + _GOLDEN)
        key = _mix(head + np.uint64(_STREAMS[stream]) * _GOLDEN)
        key = _mix(key ^ _mix(np.asarray(lineage).astype(np.uint64) + _GOLDEN))
        return _mix(key + np.asarray(position).astype(np.uint64) * _GOLDEN + _GOLDEN)


def uniform(
    seed: np.ndarray, stream: str, lineage: np.ndarray, position: np.ndarray, n: int = 1
) -> np.ndarray:
    """(R, n) float64 in (0, 1), a function of the arguments alone; R seeds, lineages, ..."""
    with np.errstate(over="ignore"):
        key = _key(seed, stream, lineage, position)[:, None]
        bits = _mix(key + np.arange(1, n + 1, dtype=np.uint64)[None, :] * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def fork_lineage(lineage: int, position: int, rank: int) -> int:
    """The lineage of a further child: new for every (parent, position, rank)."""
    key = _mix_one(lineage + _STREAMS["fork"] * int(_GOLDEN))
    key = _mix_one((key ^ position) + int(_GOLDEN))
    return _mix_one((key ^ rank) + int(_GOLDEN))


def _mix_one(value: int) -> int:
    """`_mix` of one Python integer, for the many single forks of a beam search."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * int(_MIX_1)) & _MASK
    value = ((value ^ (value >> 27)) * int(_MIX_2)) & _MASK
    return value ^ (value >> 31)


# Beyond this vocabulary, and where at most so many tokens are possible, only those are summed.
_SMALL = 4096
_FEW = 1024


@dataclass(frozen=True)
class Places:
    """Where R choices stand: `seed`, `lineage` and `position` (R,) uint64, and their `slot` (R,)
    among the `slots` rows of the call's full rectangle, finished rows included."""

    seed: np.ndarray
    lineage: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    slots: int


def places_of(
    sequences: list[Sequence], position: np.ndarray, slot: np.ndarray, slots: int
) -> Places:
    """Where choices of R sequences stand, each after `position` (R,) chosen tokens."""
    seed = np.array([s.request.draws.seed & _MASK for s in sequences], dtype=np.uint64)
    lineage = np.array([s.lineage for s in sequences], dtype=np.uint64)
    return Places(seed, lineage, position.astype(np.uint64), slot, slots)


class Draws(Protocol):
    """Chooses tokens at random for rows that stand at given places."""

    @property
    def seed(self) -> int:
        """What `Places.seed` holds for the rows of a request with these draws."""
        ...

    def choose(self, probabilities: Tensor, places: Places) -> Tensor:
        """(R, V) probabilities -> (R,) one token per row, -1 where a row holds nan."""
        ...

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        """(R, n) probabilities -> (R, count) distinct indices per row, in order of the draw.

        -1 where a row holds nan.
        """
        ...

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        """(R, n) numbers in (0, 1) from a named stream."""
        ...


def _possible(drawn: Tensor, probabilities: Tensor) -> Tensor:
    """(R, n) indices, -1 in rows of nan: where a softmax is nan at all, it is nan everywhere."""
    return torch.where(probabilities[:, :1].isnan(), -1, drawn)


def _likely(probabilities: Tensor) -> tuple[Tensor, Tensor | None]:
    """Probabilities (R, n) with their tokens, in order; without tokens where n is all of them.

    Zeros between them are left out where that leaves few, which changes no sum from left to right.
    """
    rows, width = probabilities.shape
    if width <= _SMALL or probabilities.device.type != "cpu":
        return probabilities, None
    row, token = torch.nonzero(probabilities, as_tuple=True)
    counts = torch.bincount(row, minlength=rows)
    most = max(1, int(counts.max()))
    if most > _FEW:
        return probabilities, None
    place = torch.arange(len(row)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    likely = torch.zeros(rows, most, dtype=probabilities.dtype)
    tokens = torch.zeros(rows, most, dtype=torch.int64)
    likely[row, place], tokens[row, place] = probabilities[row, token], token
    return likely, tokens


@dataclass(frozen=True)
class SharedDraws:
    """Draws what the reference draws from torch's global generator.

    `torch.multinomial` equals argmax(p / q) and, without replacement, topk(p / q), where q is
    exponential noise over all rows of the call; rows that left the batch keep their share of it.
    """

    seed: ClassVar[int] = 0

    def choose(self, probabilities: Tensor, places: Places) -> Tensor:
        chosen = (probabilities / self._noise(probabilities, places)).argmax(dim=-1)
        return _possible(chosen[:, None], probabilities)[:, 0]

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        drawn = torch.topk(probabilities / self._noise(probabilities, places), count).indices
        return _possible(drawn, probabilities)

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        drawn = torch.rand(places.slots, n, dtype=torch.float64)
        return drawn[torch.from_numpy(places.slot)]

    def _noise(self, probabilities: Tensor, places: Places) -> Tensor:
        full = torch.empty(
            places.slots,
            probabilities.shape[1],
            dtype=probabilities.dtype,
            device=probabilities.device,
        ).exponential_()
        if len(places.slot) == places.slots and (places.slot == np.arange(places.slots)).all():
            return full
        return full[torch.from_numpy(places.slot).to(full.device)]


@dataclass(frozen=True)
class SeededDraws:
    """Draws that depend on (seed, stream, lineage, position) alone.

    Rows of several requests are drawn in one call: the seeds come with the places.
    """

    seed: int

    def choose(self, probabilities: Tensor, places: Places) -> Tensor:
        """Inverse of the cumulative distribution, so that one number makes one choice."""
        likely, tokens = _likely(probabilities)
        cumulative = likely.double().cumsum(dim=-1)
        total = cumulative[:, -1:].contiguous()
        threshold = self.uniform("choice", places).to(cumulative.device) * total
        index = torch.searchsorted(cumulative, threshold, right=True)
        # rounding may reach the end: the last token with any probability is the answer then
        index = torch.minimum(index, torch.searchsorted(cumulative, total))
        drawn = index if tokens is None else tokens.gather(1, index)
        return _possible(drawn, probabilities)[:, 0]

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        """Gumbel top-k (Kool et al. 2019): the numbers are keyed by token, not by rank."""
        noise = self.uniform("choice", places, probabilities.shape[1]).to(probabilities.device)
        keys = probabilities.double().log() - torch.log(-torch.log(noise))
        return _possible(torch.topk(keys, count).indices, probabilities)

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        return torch.from_numpy(uniform(places.seed, stream, places.lineage, places.position, n))


def set_seed(seed: int, deterministic: bool = False) -> None:
    """The global generators of Python, numpy and torch start anew from `seed`.

    Draws without `seed=` come from torch's. `deterministic`: torch chooses algorithms that repeat.
    Source: the reference's `set_seed`.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise RequestError(
            message("seed is impossible", wanted="an integer from 0 to 2**32 - 1", got=repr(seed))
        )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)  # on every device
    if deterministic:
        torch.use_deterministic_algorithms(True)
