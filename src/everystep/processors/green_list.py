"""Which ids are green: the first of a seeded shuffle of the vocabulary, without shuffling it.

The shuffle is `torch.randperm` with a CPU generator: step i swaps places i and j >= i. Only the
set of the first ids matters, and that is found from the swaps with a few operations on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch

_REMEMBERED_BYTES = 2**26  # of lists of one vocabulary, at an eighth of a byte per id


def seed_of(value: int) -> int:
    """What torch's CPU generator makes of a seed that is taken modulo 2^64 - 1."""
    return value % (2**64 - 1) & 0xFFFFFFFF


def green_bits(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """Packed (V,) bits: which ids stand among the first `size` of the shuffle with that seed."""
    return _remembering(vocab_size)(vocab_size, size, seed)


@lru_cache(maxsize=4)
def _remembering(vocab_size: int) -> Callable[[int, int, int], np.ndarray]:
    """`_found_bits`, with as many lists of one vocabulary as fit into the memory for them."""
    return lru_cache(maxsize=8 * _REMEMBERED_BYTES // vocab_size + 1)(_found_bits)


def _found_bits(vocab_size: int, size: int, seed: int) -> np.ndarray:
    swapped = _swaps(vocab_size, size, seed)
    step = np.arange(size, dtype=np.int32)
    last = np.full(vocab_size, -1, dtype=np.int32)  # place -> the last step that swapped it away
    stays = np.flatnonzero(swapped == step)
    if len(stays):
        swapped, step = np.delete(swapped, stays), np.delete(step, stays)
    last[swapped] = step
    green = last >= 0
    green[:size] = True
    # What the last swap with a place beyond the first `size` has thrown out stays out.
    out = step[np.flatnonzero((last[swapped] == step) & (swapped >= size))]
    green[_held(last[:size])[out]] = False
    return np.packbits(green)


def _held(last: np.ndarray) -> np.ndarray:
    """(size,) which id stands at place i when step i comes; `last`: (size,) as in `_found_bits`."""
    held = np.arange(len(last))
    going = np.flatnonzero(last >= 0)
    while len(going):
        held[going] = earlier = last[held[going]]
        going = going[last[earlier] >= 0]
    return held


@lru_cache(maxsize=2**16)
def is_green(vocab_size: int, size: int, seed: int, token: int) -> bool:
    """Whether one id stands among the first `size`: its way through the swaps."""
    swapped = _swaps(vocab_size, size, seed)
    place, done = token, 0
    while True:
        # Until its own step comes, an id at `place` moves only to that of an earlier step.
        if (swapped[done : min(place, size)] == place).any():
            return True
        if place >= size:
            return False
        if swapped[place] == place:
            return True
        place, done = int(swapped[place]), place + 1


def _swaps(vocab_size: int, size: int, seed: int) -> np.ndarray:
    """(size,) the place that each step of the shuffle swaps with its own."""
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.empty((size + 1) // 2, dtype=torch.int64)
    numbers = pairs.random_(-(2**63), None, generator=generator).numpy().view(np.uint64)
    # A number of 64 bits is two of 32, the first one in its upper half.
    halves = (numbers << _HALF | numbers >> _HALF).view(np.uint32)[:size]
    step, left = _steps(vocab_size, size)
    return (halves % left + step).astype(np.int64)


_HALF = np.uint64(32)


@lru_cache(maxsize=4)
def _steps(vocab_size: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the steps, and how many places each may swap with."""
    step = np.arange(size, dtype=np.uint32)
    return step, np.uint32(vocab_size) - step
