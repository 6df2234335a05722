"""What a row holds as rectangles of keys and values, and back: the one place that knows both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.types import Past


def past_of(kv: Tensor) -> Past:
    """Return a past of n positions in layers of attention, from (L, 2, K, n, D)."""
    return Past(kv.shape[3], tuple((keys, values) for keys, values in kv))


def kv_of(past: Past) -> Tensor:
    """Return (L, 2, K, length, D), 0 where a window dropped positions."""
    pairs = [pair(layer) for layer in past.layers]
    return torch.stack([_padded(x, 0, past.length - x.shape[2]) for x in pairs])


def across_of(past: Past) -> Tensor | None:
    """Return (L, 2, K, S, D) of encoder states, None where there are none."""
    pairs = [pair(layer[2:]) for layer in past.layers if len(layer) == 4]
    return torch.stack(pairs) if pairs else None


def with_across(past: Past, across: Tensor) -> Past:
    """Return the past, with (L, 2, K, S, D) of encoder states after its own keys and values."""
    layers = zip(past.layers, across, strict=True)
    return Past(past.length, tuple((*own, *seen) for own, seen in layers))


def without_across(past: Past) -> Past:
    """Return the past with its own keys and values alone."""
    return Past(past.length, tuple(own[:2] for own in past.layers))


def pair(held: Sequence[Tensor]) -> Tensor:
    """Return (2, K, n, D) of keys and values, the shorter filled up with zeros."""
    dim = max(one.shape[-1] for one in held[:2])
    return torch.stack([_padded(x, dim - x.shape[-1], 0) for x in held[:2]])


def _padded(x: Tensor, size: int, before: int) -> Tensor:
    """Return (..., before + n, D + size) from (..., n, D); a copy only if something is added."""
    return F.pad(x, (0, size, before, 0)) if size or before else x


def states_of(past: Past) -> Tensor:
    """Return (L, inputs + states, channels) in float32, from the states of each recurrent layer.

    A layer has (inputs, channels) and (channels, states).
    """
    layers = [torch.cat([inputs, states.T]) for inputs, states in past.layers]
    return torch.stack(layers).float().contiguous()


def states_past(length: int, held: Tensor, inputs: int) -> Past:
    """Undo `states_of`, for n positions; `inputs`: how many of them layers keep."""
    layers = ((layer[:inputs], layer[inputs:].T.contiguous()) for layer in held)
    return Past(length, tuple(layers))
