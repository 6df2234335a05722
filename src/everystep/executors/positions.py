"""Inputs, position ids and wanted places of a work, as executors read them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.nn.network import Network
from everystep.types import Extra, InputSpec, Work


def declared_inputs(network: Network) -> dict[str, InputSpec]:
    """What the feeds of a network may bring, as in `Executor.inputs`."""
    return {
        "positions": InputSpec("positions", "token", (network.axes,), torch.int64),
        "mask": InputSpec("mask", "token", (network.heads,), torch.bool),
        **{one.name: one for one in network.inputs},
    }


def row_positions(work: Work) -> np.ndarray:
    """(N,) the place of every token in its row."""
    starts, counts = work.starts, work.counts
    within = np.arange(len(work.tokens)) - np.repeat(work.offsets, counts)
    return np.repeat(starts, counts) + within


def own_positions(work: Work) -> list[tuple[int, Extra, Tensor]]:
    """Index, extra and position ids of every feed that has position ids of its own."""
    extras = work.extras.items()
    return [(f, extra, extra.positions) for f, extra in extras if extra.positions is not None]


def position_ids(work: Work, axes: int = 1) -> np.ndarray:
    """(N,) position ids, or (axes, N) for a model of several; RequestError if they do not fit.

    Where a feed gives none, or one axis for all, it stands at the same place on every axis.
    """
    places = row_positions(work)
    if axes > 1:
        places = np.repeat(places[None], axes, axis=0)
    offsets = work.offsets
    for f, _, given in own_positions(work):
        count = int(work.counts[f])
        if given.shape[-1] != count or given.numel() not in (count, axes * count):
            raise RequestError(
                message(
                    "position_ids do not fit the model",
                    wanted=f"{axes} x {count}" if axes > 1 else f"one position per token, {count}",
                    got=tuple(given.shape),
                )
            )
        span = slice(offsets[f], offsets[f] + count)
        places[..., span] = given.reshape(-1, count).cpu().numpy()
    return places


def row_lengths(work: Work) -> np.ndarray:
    """(F,) one more than the greatest position id of each feed."""
    lengths: np.ndarray = work.starts + work.counts
    for f, _, given in own_positions(work):
        lengths[f] = int(given.max()) + 1
    return lengths


def given_inputs(work: Work, name: str) -> Iterator[tuple[int, Tensor]]:
    """Where values of the named input begin among all N inputs, and the values (n, ...)."""
    if not work.extras:
        return
    offsets = work.offsets
    for f, extra in work.extras.items():
        for given in extra.inputs:
            if given.name == name:
                yield int(offsets[f]) + given.start, given.values


def wanted_places(work: Work) -> np.ndarray:
    """(R,) places among the tokens whose logits are wanted, in feed order."""
    ends = np.cumsum(work.counts)
    offsets = np.repeat(ends - np.cumsum(work.logits), work.logits)
    return offsets + np.arange(int(work.logits.sum()))
