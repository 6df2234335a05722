"""What is mixed into logits, as in its textbook: guidance, and contrast with an amateur."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from everystep.engine import Contrast, Guidance
from everystep.testing.hash_function import HashFunction
from everystep.types import Prompt, Request

Ask = Callable[[HashFunction, Prompt, list[int]], Tensor]


def mix(
    request: Request,
    readout: Any,
    logits: Tensor,
    tokens: list[int],
    ask: Ask,
    function: HashFunction,
    may: Tensor,
) -> Tensor:
    """(V,) logits of what may follow the tokens -> what the readout of the request makes of them.

    `ask(function, prompt, tokens)`: the logits of what may follow a prompt and tokens. `may`: (V,)
    bool of what nothing rules out.
    """
    if isinstance(readout, Guidance):
        other = ask(function, request.companions[0], tokens).log_softmax(-1)
        return readout.scale * (logits.log_softmax(-1) - other) + other
    if isinstance(readout, Contrast):
        amateur = cast(Any, readout.open()).function
        p, q = logits.log_softmax(-1), ask(amateur, request.prompt, tokens).log_softmax(-1)
        plausible = p >= p[may].max() + math.log(readout.alpha)
        return torch.where(plausible, p - readout.beta * q, -torch.inf)
    return logits
