"""Some of the positions of a step, and where they stand among others."""

from __future__ import annotations

import torch
from torch import Tensor


def places_among(places: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return which (m,) of `places` (n,) are among the `chosen` (k,), by their index, and the index
    (m,) of each among these.

    No place is in either of them twice.
    """
    chosen = chosen.to(places.device)
    most = 1 + max(int(one.max()) if len(one) else 0 for one in (places, chosen))
    numbers = places.new_full((most,), -1)
    numbers[places] = torch.arange(len(places), device=places.device)
    found = numbers[chosen]
    here = (found >= 0).nonzero().squeeze(1)
    return found[here], here


def kept_places(read: Tensor, kept: slice | Tensor) -> Tensor:
    """Return (B * n,) the places of the `kept` positions of each row of a rectangle (B, T, ...)."""
    batch, length = read.shape[:2]
    return torch.arange(batch * length).view(batch, length)[:, kept].flatten()
