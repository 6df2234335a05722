"""The order of the data, and its randomness: functions of (seed, epoch, example) alone.

So a resumed run skips what it has read without touching it, and an example that draws random
numbers of its own draws the same ones, whatever was drawn before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from everystep.draws import mix_one
from everystep.train.arguments import Sampling

_SORTED_TOGETHER = 50
"""Batches among which examples of like lengths come together."""


def epoch_order(
    count: int,
    seed: int,
    epoch: int,
    sampling: Sampling,
    lengths: Sequence[int] | None = None,
    batch_size: int = 1,
) -> list[int]:
    """Return the numbers of the examples in the order of an epoch.

    "random" is the order of transformers' Trainer. `lengths`: of each example, for
    "group_by_length": the longest of each stretch of batches come first.
    """
    if sampling == "sequential":
        return list(range(count))
    generator = torch.Generator().manual_seed(seed + epoch)
    shuffled = torch.randperm(count, generator=generator).tolist()
    if sampling == "random" or lengths is None:
        return shuffled
    size = batch_size * _SORTED_TOGETHER
    stretches = (shuffled[start : start + size] for start in range(0, count, size))
    return [one for some in stretches for one in sorted(some, key=lambda i: -lengths[i])]


def batches_of(order: Sequence[int], size: int, *, drop_last: bool = False) -> list[list[int]]:
    """Return the examples of each batch; a last one that is not full may be dropped."""
    found = [list(order[start : start + size]) for start in range(0, len(order), size)]
    return found[:-1] if drop_last and found and len(found[-1]) < size else found


@contextmanager
def keyed_randomness(*key: int, device: torch.device | None = None) -> Iterator[None]:
    """Let Python's, numpy's and torch's global generators begin at a place that the key alone
    says, on the CPU and the device, and go on afterwards where they were."""
    seed = 0
    for one in key:
        seed = mix_one(seed ^ mix_one(one + 1))
    places = [device] if device is not None and device.type == "cuda" else []
    python, array = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=places):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed % 2**63)
            for place in places:
                torch.cuda.default_generators[place.index or 0].manual_seed(seed % 2**63)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
