"""Inputs and position ids of a work, as executors read them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from everystep.cache.plan import runs
from everystep.errors import RequestError
from everystep.nn.network import Network
from everystep.types import MOST_POSITION, InputSpec, Work


def declared_inputs(network: Network) -> dict[str, InputSpec]:
    """Return what the feeds of a network may bring, as in `Executor.inputs`."""
    return {
        "positions": InputSpec("positions", "token", (network.axes,), torch.int64),
        "mask": InputSpec("mask", "token", (network.heads,), torch.bool),
        **{one.name: one for one in network.inputs},
    }


def own_positions(work: Work) -> list[tuple[int, Tensor]]:
    """Return index and position ids of every feed that has position ids of its own."""
    extras = work.extras.items()
    return [(f, extra.positions) for f, extra in extras if extra.positions is not None]


def position_ids(work: Work, axes: int = 1) -> np.ndarray:
    """Return (N,) position ids, or (axes, N) for a model of several.

    Raise RequestError if they do not fit. Where a feed gives none, or one axis for all, it stands
    at the same place on every axis.
    """
    places = runs(work.starts, work.counts)
    if axes > 1:
        places = np.repeat(places[None], axes, axis=0)
    offsets = work.offsets
    for f, given in own_positions(work):
        count = int(work.counts[f])
        if given.shape[-1] != count or given.numel() not in (count, axes * count):
            raise RequestError(
                "position_ids do not fit the model",
                wanted=f"{axes} x {count}" if axes > 1 else f"one position per token, {count}",
                got=tuple(given.shape),
            )
        require_positions(given)
        span = slice(offsets[f], offsets[f] + count)
        places[..., span] = given.reshape(-1, count).cpu().numpy()
    return places


def require_positions(positions: Tensor) -> None:
    """Raise RequestError where one of the integers is no position."""
    if positions.is_complex():
        what = "position_ids are no integers"
        raise RequestError(what, wanted="integers", got=positions.dtype, do="Count from 0 on")
    wrong = positions[(positions < 0) | (positions > MOST_POSITION)]
    if wrong.numel():
        what, wanted = "position_ids holds a number that is no position", f"0 to {MOST_POSITION}"
        raise RequestError(what, wanted=wanted, got=int(wrong[0]), do="Count from 0 on")


def require_places(network: Network, work: Work) -> None:
    """Raise RequestError where a feed has a position that the network cannot tell from others."""
    if network.most_positions is None or not len(work.rows):
        return
    given = [int(places.min()) for _, places in own_positions(work) if places.numel()]
    network.require_places(min(given, default=0), int(row_lengths(work).max()) - 1)


def row_lengths(work: Work) -> np.ndarray:
    """Return (F,) one more than the greatest position id of each feed."""
    lengths: np.ndarray = work.starts + work.counts
    for f, given in own_positions(work):
        lengths[f] = int(given.max()) + 1
    return lengths


def given_inputs(
    work: Work, name: str, begins: np.ndarray | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield where values of the named input begin among all N inputs, and the values (n, ...).

    `begins`: (F,) where feeds begin; None: one after another.
    """
    for f, extra in work.extras.items():
        for given in extra.inputs:
            if given.name == name:
                begin = (work.offsets if begins is None else begins)[f]
                yield int(begin) + given.start, given.values
