"""Sequences of different lengths, packed one after another, as recurrent layers read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """R feeds of `lengths` (R,) positions, T at most and at least 1.

    `places`: where the N packed positions stand among R * T, None if they are the same; `chosen`:
    which of the `total` packed positions count, None for all. `rows`, `steps` (M,): the states to
    keep, of feed `rows[m]` after its first `steps[m]` positions, feed by feed. `ends`: step ->
    which of the M states are to be kept after it, and of which feeds.
    """

    lengths: np.ndarray
    longest: int
    rows: Tensor
    steps: Tensor
    ends: Mapping[int, tuple[Tensor, Tensor]]
    places: Tensor | None
    chosen: Tensor | None = None
    total: int = 0

    @staticmethod
    def of(counts: Sequence[int], kept: Sequence[Sequence[int]], device: torch.device) -> Ragged:
        """Describe feeds of so many positions, with states kept after so many of each."""
        lengths = np.array(counts, dtype=np.int64)
        longest = int(lengths.max(initial=1))  # at least one, of which a row of padding reads 0
        rows = np.repeat(np.arange(len(counts)), [len(one) for one in kept])
        steps = np.array([step for one in kept for step in one], dtype=np.int64)
        places = None
        if (lengths != longest).any():
            seen = np.arange(longest) < lengths[:, None]
            places = on_device(device, np.flatnonzero(seen))
        ends = {}
        for step in np.unique(steps).tolist():
            entries = np.flatnonzero(steps == step)
            ends[step] = (on_device(device, entries), on_device(device, rows[entries]))
        return Ragged(
            lengths, longest, on_device(device, rows), on_device(device, steps), ends, places
        )

    @staticmethod
    def of_rectangle(batch: int, length: int, seen: Tensor | None, device: torch.device) -> Ragged:
        """Describe B rows of T positions of which `seen` (B, T) count; no state is kept."""
        if seen is None:
            return Ragged.of([length] * batch, [[]] * batch, device)
        ragged = Ragged.of(seen.sum(dim=1).tolist(), [[]] * batch, device)
        chosen = seen.flatten().nonzero().flatten()
        return replace(ragged, chosen=chosen, total=batch * length)

    def padded(self, x: Tensor) -> Tensor:
        """Pad (N, ...) -> (R, T, ...), 0 after the end of a feed."""
        shape = (len(self.lengths), self.longest, *x.shape[1:])
        given = x if self.chosen is None else x[self.chosen]
        if self.places is None:
            return given.view(shape)
        room = x.new_zeros(shape[0] * shape[1], *shape[2:])
        room[self.places] = given
        return room.view(shape)

    def packed(self, x: Tensor) -> Tensor:
        """Pack (R, T, ...) -> (N, ...), 0 where a position does not count."""
        flat = x.flatten(0, 1)
        found = flat if self.places is None else flat[self.places]
        if self.chosen is None:
            return found
        room = x.new_zeros(self.total, *x.shape[2:])
        room[self.chosen] = found
        return room
