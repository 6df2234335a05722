"""DoLa as in its textbook, for the hash function."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.testing.hash_function import HashFunction


def dola(
    function: HashFunction, state: int, last: Tensor, layers: tuple[int, ...], may: Tensor
) -> Tensor:
    """(V,) logits contrasted with the layer that differs most, as in Chuang et al. 2023, among the
    likely ones of those that may follow, (V,) bool."""
    p, furthest, base = last.softmax(-1), -torch.inf, last
    for layer in layers:
        early = function.early(np.array([state], np.uint64), layer)[0]
        q = early.softmax(-1)
        m = (p + q) / 2
        apart = float((m * (m / p).log() + m * (m / q).log()).mean())
        if apart > furthest:
            furthest, base = apart, early
    contrast = last.log_softmax(-1) - base.log_softmax(-1)
    return contrast.masked_fill(p < 0.1 * p[may].max(), -torch.inf)
