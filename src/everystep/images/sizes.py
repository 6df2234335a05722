"""To which size pictures are resized, which frames of a video are read, and when they were shown.

Source: `smart_resize` and `sample_frames` of transformers' Qwen2-VL and Qwen3-VL processors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from everystep.errors import RequestError

_MOST_ASPECT = 200
_LEAST_FRAMES, _MOST_FRAMES = 4, 768


def image_size(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Height and width in multiples of `factor`, with `least` to `most` pixels, in about the same
    proportion; RequestError where one side is more than 200 times the other."""
    return _fitted(1, 1, height, width, factor, least, most)


def video_size(
    frames: int, height: int, width: int, group: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    """Return the size for the frames of a video, whose pixels count together; `group` of them
    become one frame group. Frames smaller than `factor` are enlarged first."""
    if frames < group:
        what = "a video has too few frames"
        raise RequestError(what, wanted=f"at least {group}", got=frames, do="Pass more of them")
    if min(height, width) < factor and height and width:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _fitted(frames, group, height, width, factor, least, most)


def _fitted(
    frames: int, group: int, height: int, width: int, factor: int, least: int, most: int
) -> tuple[int, int]:
    if min(height, width) < 1 or max(height, width) > _MOST_ASPECT * min(height, width):
        raise RequestError(
            "a picture has an impossible form",
            wanted=f"sides of which none is more than {_MOST_ASPECT} times the other",
            got=f"{width} x {height} pixels",
            do="Crop it",
        )
    # Halves go to the even number, as Python and transformers round.
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(frames / group) * group * high * wide
    if pixels > most:
        scale = math.sqrt(frames * height * width / most)
        high = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < least:
        scale = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * scale / factor) * factor
        wide = math.ceil(width * scale / factor) * factor
    return high, wide


def sampled_frames(total: int, source_fps: float, fps: float) -> list[int]:
    """Return the frames of a video of `total` that are read, `fps` of each second."""
    wanted = int(total / source_fps * fps)
    count = min(max(wanted, _LEAST_FRAMES), _MOST_FRAMES, total)
    found: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return found


def times_of(frames: Sequence[int], source_fps: float, group: int) -> list[float]:
    """When each frame group was shown, in seconds: between its first and its last frame."""
    whole = [*frames, *[frames[-1]] * (-len(frames) % group)]
    starts = range(0, len(whole), group)
    return [(whole[at] / source_fps + whole[at + group - 1] / source_fps) / 2 for at in starts]
