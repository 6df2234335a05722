"""Activation functions by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return x times the logistic function of 1.702 x, which is close to GELU."""
    return x * (1.702 * x).sigmoid()


ACTIVATIONS: Mapping[str, Activation] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
}


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Gate (..., 2F), gate before up, -> (..., F): activation(gate) * up (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
