"""How a model's pictures are prepared, as the files beside it say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.files.strict_json import read_json
from everystep.images.image_arrays import resized
from everystep.images.sizes import image_size, video_size

PROCESSOR, IMAGES, VIDEOS = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
_BICUBIC = 3


@dataclass(frozen=True)
class PictureSettings:
    """`patch`: pixels along a patch; `merge`: patches along a feature; `frames`: of a frame group.

    `least`, `most`: pixels after resizing, those of all frames of a video together. `fps`: frames
    of a second of video that are read. Values are multiplied by `scale`; then `mean` is taken off,
    and they are divided by `deviation`.
    """

    patch: int
    merge: int
    frames: int
    least: int
    most: int
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    fps: float = 2.0

    def to_dict(self) -> dict[str, Any]:
        """Return the values as the files have them."""
        return {
            "patch_size": self.patch,
            "merge_size": self.merge,
            "temporal_patch_size": self.frames,
            "size": {"shortest_edge": self.least, "longest_edge": self.most},
            "rescale_factor": self.scale,
            "image_mean": list(self.mean),
            "image_std": list(self.deviation),
            "resample": _BICUBIC,
            "do_convert_rgb": True,
            "fps": self.fps,
        }

    def image(self, image: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Cut an image (height, width, 3) of bytes into patches (n, values), and tell its grid."""
        return self.patches(self.scaled(image))

    def scaled(self, image: np.ndarray) -> np.ndarray:
        """Return an image (height, width, 3) of bytes in the size in which it is read."""
        height, width = image.shape[:2]
        size = image_size(height, width, self.patch * self.merge, self.least, self.most)
        return resized(image, *size)

    def patches(self, scaled: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the patches (n, values) and the grid of an image that was scaled.

        RequestError for one whose size is not of whole patches.
        """
        unit = self.patch * self.merge
        if any(edge % unit or not edge for edge in scaled.shape[:2]):
            wanted, got = f"multiples of {unit}", scaled.shape[:2]
            raise RequestError("an image was scaled to another size", wanted=wanted, got=got)
        return self._patches([scaled] * self.frames)

    def features(self, scaled: np.ndarray) -> int:
        """Return how many features an image that was scaled becomes."""
        return int(scaled.shape[0] * scaled.shape[1]) // (self.patch * self.merge) ** 2

    def video(self, frames: list[np.ndarray]) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the frames of a video as patches and a grid; the last one fills up the last
        group."""
        height, width = frames[0].shape[:2]
        factor = self.patch * self.merge
        size = video_size(len(frames), height, width, self.frames, factor, self.least, self.most)
        small = [resized(one, *size) for one in frames]
        return self._patches([*small, *small[-1:] * (-len(small) % self.frames)])

    def _patches(self, frames: list[np.ndarray]) -> tuple[np.ndarray, tuple[int, int, int]]:
        values = (np.stack(frames).astype(np.float64) * self.scale).astype(np.float32)
        mean, deviation = (np.array(x, np.float32) for x in (self.mean, self.deviation))
        values = (values - mean) / deviation
        rows, columns = (size // self.patch for size in values.shape[1:3])
        grid = (len(frames) // self.frames, rows, columns)
        cut = values.reshape(
            grid[0],
            self.frames,
            rows // self.merge,
            self.merge,
            self.patch,
            columns // self.merge,
            self.merge,
            self.patch,
            3,
        )
        # Group, block, patch in the block; then channel, frame, row, column.
        moved = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return np.ascontiguousarray(moved).reshape(int(np.prod(grid)), -1), grid


def read_picture_settings(folder: Path) -> tuple[PictureSettings, PictureSettings] | None:
    """Read the settings for images and for videos; None where a folder says nothing of images.

    FormatError for impossible values, UnsupportedError for ways of preparing that are not here.
    """
    whole: Mapping[str, Any] = read_json(folder / PROCESSOR) or {}
    images = whole.get("image_processor") or read_json(folder / IMAGES)
    videos = whole.get("video_processor") or read_json(folder / VIDEOS)
    if images is None:
        return None
    own = _read(images, IMAGES, least=56 * 56, most=28 * 28 * 1280)
    # Files of older models say nothing of videos, which are prepared as images are.
    return own, _read(videos or images, VIDEOS, least=128 * 32 * 32, most=32 * 32 * 768)


def _read(values: object, name: str, *, least: int, most: int) -> PictureSettings:
    if not isinstance(values, Mapping):
        raise FormatError(f"{name} holds no settings", wanted="an object", got=shown(values)[:80])
    size = values.get("size") or {}
    if not isinstance(size, Mapping):
        raise _impossible(name, "size", "an object", size)
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if values.get(key) is False:
            raise UnsupportedError(f"{name}: {key} is false", wanted="true", do="Remove it")
    if values.get("resample") not in (None, _BICUBIC):
        wanted, got = f"{_BICUBIC}, bicubic", values["resample"]
        raise UnsupportedError(f"{name}: resample is not supported", wanted=wanted, got=got)
    limits = [
        _whole(name, {**values, **size}, keys, default)
        for keys, default in (
            (("min_pixels", "shortest_edge"), least),
            (("max_pixels", "longest_edge"), most),
        )
    ]
    if limits[0] > limits[1]:
        raise _impossible(name, "size", "a least that is not above the most", limits)
    return PictureSettings(
        patch=_whole(name, values, ("patch_size",), 14),
        merge=_whole(name, values, ("merge_size",), 2),
        frames=_whole(name, values, ("temporal_patch_size",), 2),
        least=limits[0],
        most=limits[1],
        scale=_number(name, values, "rescale_factor", 1 / 255),
        mean=_three(name, values, "image_mean", (0.48145466, 0.4578275, 0.40821073)),
        deviation=_three(name, values, "image_std", (0.26862954, 0.26130258, 0.27577711)),
        fps=_number(name, values, "fps", 2.0),
    )


def _whole(name: str, values: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    for key in keys:
        value = values.get(key)
        if value is not None:
            if type(value) is not int or not 1 <= value < 1 << 31:
                raise _impossible(name, key, "a whole number of at least 1", value)
            return value
    return default


def _number(name: str, values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise _impossible(name, key, "a positive number", value)
    return float(value)


def _three(
    name: str, values: Mapping[str, Any], key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value = values.get(key)
    if value is None:
        return default
    numbers = isinstance(value, list) and all(type(one) in (int, float) for one in value)
    if not numbers or len(value) != 3 or (key == "image_std" and min(value) <= 0):
        raise _impossible(name, key, "3 numbers, one per colour", value)
    return (float(value[0]), float(value[1]), float(value[2]))


def _impossible(name: str, key: str, wanted: object, got: object) -> FormatError:
    return FormatError(f"{name}: {key} is impossible", wanted=wanted, got=shown(got)[:100])
