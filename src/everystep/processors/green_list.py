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
    moved = swapped != step
    last = np.full(vocab_size, -1, dtype=np.int32)  # place -> the last step that swapped it away
    last[swapped[moved]] = step[moved]
    green = np.concatenate([np.ones(size, dtype=bool), last[size:] >= 0])
    green[_at_step(last, last[size:][green[size:]])] = False
    return np.packbits(green)


def _at_step(last: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Which id stood at place `step` when that step came: those are swapped out to the end."""
    held = step.copy()
    going = np.arange(len(held))
    while len(going):
        earlier = last[held[going]]
        going = going[earlier >= 0]
        held[going] = earlier[earlier >= 0]
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
    # A number of 64 bits is two of 32, the first one in its upper half.
    pairs.random_(-(2**63), None, generator=generator)
    halves = pairs.numpy().view(np.uint32).reshape(-1, 2)[:, ::-1].reshape(-1)[:size]
    step = np.arange(size, dtype=np.uint32)
    return (halves % (np.uint32(vocab_size) - step) + step).astype(np.int64)
