"""Where patches lie in a picture, and where its features stand in a prompt.

Patches come frame group by frame group; within one, those that are merged lie next to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError
from everystep.models.vision.spec import Grid, VisionSpec

TEXT, IMAGE, VIDEO = 0, 1, 2
"""The kinds of positions, as `mm_token_type_ids` say it."""
AXES = 3


@dataclass(frozen=True, slots=True)
class Extent:
    """A picture in a prompt: its grid, and how many seconds a frame group of it lasts."""

    grid: Grid
    seconds: float = 1.0


def patch_places(grid: Grid, merge: int) -> Tensor:
    """Return (2, h * w) row and column of every patch of a frame group."""
    _, height, width = grid
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    blocks = places.view(2, height // merge, merge, width // merge, merge)
    return blocks.transpose(2, 3).flatten(1)


def table_places(places: Tensor, grid: Grid, side: int) -> tuple[Tensor, Tensor]:
    """Return (h * w, 4) entries around every patch of a table of `side` times `side`, and shares.

    The corners of the picture meet those of the table.
    """
    (rows, of_rows), (columns, of_columns) = (
        _neighbours(index, size, side) for index, size in zip(places, grid[1:], strict=True)
    )
    entries = rows[:, :, None] * side + columns[:, None, :]
    return entries.flatten(1), (of_rows[:, :, None] * of_columns[:, None, :]).flatten(1)


def _neighbours(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return (n, 2) the two entries of a line of `side` between which each of `size` places lies.

    Their shares are float32.
    """
    exact = index.float() * (side - 1) / torch.tensor(max(size - 1, 1))
    floor, steps = exact.floor(), torch.arange(2)
    entries = (floor.long()[:, None] + steps).clamp(0, side - 1)
    return entries, (1 - (exact[:, None] - floor[:, None] - steps).abs()).clamp(min=0)


def window_places(grid: Grid, merge: int, window: int) -> tuple[Tensor, list[int]]:
    """Return the features of a frame group by windows, and how many patches each window has."""
    rows, columns = grid[1] // merge, grid[2] // merge
    numbers = torch.arange(rows * columns).view(rows, columns)
    bands = [numbers[at : at + window] for at in range(0, rows, window)]
    starts = range(0, columns, window)
    windows = [band[:, at : at + window].flatten() for band in bands for at in starts]
    return torch.cat(windows), [len(one) * merge**2 for one in windows]


# --- in a prompt ----------------------------------------------------------------------------------


def kinds_of(spec: VisionSpec, ids: np.ndarray) -> np.ndarray:
    """Return (n,) what stands at each position."""
    found = np.where(ids == spec.image_token, IMAGE, TEXT)
    return np.where(ids == spec.video_token, VIDEO, found)


def rope_index(
    spec: VisionSpec, kinds: np.ndarray, images: Iterable[Extent], videos: Iterable[Extent]
) -> tuple[np.ndarray, int]:
    """Return (3, n) time, row and column of every position of a prompt without padding.

    The second value is the position id of what comes next. Text goes on by one on all axes;
    features of a picture stand at the row and column of theirs, counted from where the picture
    begins, and what follows goes on behind the longer side of it. Raise RequestError where
    placeholders and pictures do not fit together. Source: Wang et al. 2024 (M-RoPE);
    `get_rope_index` of transformers.
    """
    parts = {
        IMAGE: _frames(spec, images, apart=True),
        VIDEO: _frames(spec, videos, spec.frames_apart),
    }
    found, start, at = [np.empty((AXES, 0), np.int64)], 0, 0
    while at < len(kinds):
        kind, stop = int(kinds[at]), _end_of_run(kinds, at)
        if kind == TEXT:
            found.append(np.broadcast_to(np.arange(start, start + stop - at), (AXES, stop - at)))
            start, at = start + stop - at, stop
            continue
        own, longest = next(parts[kind], (None, 0))
        if own is None or own.shape[1] > stop - at:
            raise misplaced(
                kind, f"{0 if own is None else own.shape[1]} at position {at}", stop - at
            )
        found.append(own + start)
        start, at = start + longest, at + own.shape[1]
    for kind, rest in parts.items():
        if next(rest, None) is not None:
            raise misplaced(kind, "a place for every picture", "more pictures")
    return np.concatenate(found, axis=1), start


def misplaced(kind: int, wanted: object, got: object) -> RequestError:
    """Return the error for placeholders that do not fit the pictures of a prompt."""
    name = {IMAGE: "image", VIDEO: "video"}[kind]
    return RequestError(
        f"the {name} placeholders of a prompt do not fit its {name}s",
        wanted=wanted,
        got=got,
        do="Pass ids and grids as the processor returned them together",
    )


def _end_of_run(kinds: np.ndarray, start: int) -> int:
    others = np.flatnonzero(kinds[start:] != kinds[start])
    return start + int(others[0]) if len(others) else len(kinds)


def _frames(
    spec: VisionSpec, pictures: Iterable[Extent], apart: bool
) -> Iterator[tuple[np.ndarray, int]]:
    """Yield (3, n) places of features that stand together, from 0 on.

    The second value says how far text goes on behind them.
    """
    for one in pictures:
        frames, rows, columns = one.grid[0], one.grid[1] // spec.merge, one.grid[2] // spec.merge
        step = 1.0 if spec.time_step is None else spec.time_step * one.seconds
        times = [0] * frames if apart else _times(frames, step)
        for group in [[time] for time in times] if apart else [times]:
            places = np.meshgrid(group, np.arange(rows), np.arange(columns), indexing="ij")
            yield np.stack(places).reshape(AXES, -1), max(rows, columns)


def _times(frames: int, step: float) -> Sequence[int]:
    """Return positions of frame groups, whole numbers, each rounded down as float32 has it."""
    times: list[int] = (torch.arange(frames) * step).long().tolist()
    return times
