"""Experts: many MLPs, of which each position reads the few that a router chooses for it.

Positions are put in the order of their experts, and each expert multiplies all of its own at once.
An expert that no position chose is not read. Sources: Shazeer et al. 2017, Fedus et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from everystep.nn.linear import LinearMap


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """`router`: E -> count, always floats. `up` and `down`: the maps of each expert."""

    router: LinearMap
    up: tuple[LinearMap, ...]
    down: tuple[LinearMap, ...]

    def choose(self, x: Tensor, chosen: int, *, normalised: bool) -> tuple[Tensor, Tensor]:
        """Choose for (N, E) the `chosen` experts: their shares and numbers, (N, chosen), largest
        first.

        Shares are probabilities over all experts, taken in float32 as in transformers.
        `normalised`: those of the chosen ones add up to 1.
        """
        every = self.router(x).softmax(-1, dtype=torch.float32)
        shares, numbers = every.topk(chosen, dim=-1)
        if normalised:
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(x.dtype), numbers

    def __call__(
        self, x: Tensor, chosen: int, activate: Callable[[Tensor], Tensor], *, normalised: bool
    ) -> Tensor:
        """Return (N, E): what the chosen experts make of each position (N, E), by their shares.

        `activate`: what an expert's `up` gives -> what its `down` reads.
        """
        shares, numbers = self.choose(x, chosen, normalised=normalised)
        flat = numbers.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.up)).tolist()
        out = torch.zeros_like(x)
        for expert, places in enumerate(torch.split(order, counts)):
            if len(places):
                rows = places // chosen
                inner = activate(self.up[expert].at(rows)(x[rows]))
                made = self.down[expert].at(rows)(inner)
                out.index_add_(0, rows, made * shares.flatten()[places, None])
        return out
