"""Position ids of a work, as executors with one position per token read them."""

from __future__ import annotations

import numpy as np

from everystep.errors import RequestError, message
from everystep.types import Work


def check_positions(work: Work) -> None:
    """There is one position id per token; RequestError otherwise."""
    positions = work.positions
    if positions is not None and positions.numel() != len(work.tokens):
        raise RequestError(
            message(
                "this model has one position per token",
                wanted=f"position_ids of shape (..., {len(work.tokens)}) with nothing before",
                got=tuple(positions.shape),
            )
        )


def row_positions(work: Work) -> np.ndarray:
    """(N,) the place of every token in its row."""
    starts, counts = work.starts, work.counts
    within = np.arange(len(work.tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + within


def row_lengths(work: Work) -> np.ndarray:
    """(F,) one more than the last position id of each feed."""
    if work.positions is None:
        return work.starts + work.counts
    flat = work.positions.flatten().cpu().numpy()
    ends = np.cumsum(work.counts)
    return np.maximum.reduceat(flat, ends - work.counts) + 1


def wanted_places(work: Work) -> np.ndarray:
    """(R,) places among the tokens whose logits are wanted, in feed order."""
    ends = np.cumsum(work.counts)
    offsets = np.repeat(ends - np.cumsum(work.logits), work.logits)
    return offsets + np.arange(int(work.logits.sum()))
