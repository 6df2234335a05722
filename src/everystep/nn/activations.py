"""Activation functions by the names that configurations use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.errors import RequestError, shown

Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """Return x times the logistic function of 1.702 x, which is close to GELU."""
    return x * (1.702 * x).sigmoid()


def gelu_10(x: Tensor) -> Tensor:
    """Return GELU, between -10 and 10."""
    return F.gelu(x).clamp(-10, 10)


def relu_squared(x: Tensor) -> Tensor:
    """Return the square of what is above 0 (So et al. 2021)."""
    return F.relu(x).square()


def laplace(x: Tensor) -> Tensor:
    """Return the distribution function of Laplace's normal law around the root of a half, which is
    close to the squared ReLU (Ma et al. 2022)."""
    return 0.5 * (1.0 + ((x - 0.707107) / (0.282095 * math.sqrt(2.0))).erf())


def sqrt_softplus(x: Tensor) -> Tensor:
    """Return the root of the softplus."""
    return F.softplus(x).sqrt()


def linear(x: Tensor) -> Tensor:
    """Return x itself."""
    return x


_KNOWN: dict[str, Activation] = {
    **dict.fromkeys(("silu", "swish"), F.silu),
    **dict.fromkeys(("gelu", "gelu_python"), F.gelu),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate"), gelu_tanh),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh"), gelu_tanh),
    "gelu_10": gelu_10,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "relu2": relu_squared,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "hardswish": F.hardswish,
    "laplace": laplace,
    "linear": linear,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": sqrt_softplus,
    "tanh": torch.tanh,
}
_BUILT_IN = frozenset(_KNOWN)
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(_KNOWN)
"""Names -> functions: those of transformers that have no weights, and those that were
registered."""


def register_activation(name: str, function: Activation) -> None:
    """Let models be loaded whose configuration names this activation.

    The function takes a tensor of any shape and returns one of the same shape, element by element;
    the model then runs on torch operators. A registered name may be given another function, for
    models that are loaded afterwards and before; a name of this library may not.

    Example:

        >>> es.register_activation("squared_silu", lambda x: torch.nn.functional.silu(x) ** 2)
    """
    if not isinstance(name, str) or not name or name in _BUILT_IN:
        raise RequestError(
            "an activation cannot be registered under this name",
            wanted="a text that is not one of " + ", ".join(sorted(_BUILT_IN)),
            got=shown(name),
        )
    sample = torch.linspace(-1.0, 1.0, 6).view(2, 3)
    found = function(sample.clone()) if callable(function) else None
    if not isinstance(found, Tensor) or found.shape != sample.shape or found.dtype != sample.dtype:
        raise RequestError(
            f"{name!r} is no activation",
            wanted="a function that returns a tensor of the shape and type of its argument",
            got=shown(function) if found is None else shown(found),
        )
    _KNOWN[name] = function


def gated(x: Tensor, activation: Activation) -> Tensor:
    """Gate (..., 2F), gate before up, -> (..., F): activation(gate) * up (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up
