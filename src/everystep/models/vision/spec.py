"""What a vision tower is, as values: everything that distinguishes one family from another."""

from __future__ import annotations

from dataclasses import dataclass

from everystep.nn.norm import NormKind

Grid = tuple[int, int, int]
"""The number of frame groups of a picture, and its height and width in patches."""


@dataclass(frozen=True)
class VisionSpec:
    """A transformer over the patches of one frame group at a time.

    `patch`: pixels along the side of a patch, which is `frames` frames deep; `merge` times `merge`
    patches become one feature of `out` values. `side`: the table of learned positions is so many
    entries high and wide, None without one. `taps`: the blocks after which features are taken for
    the first layers of the decoder. `window`: how many features a window is high and wide, outside
    of which only the blocks `whole` look; None where all blocks do. `time_step`: positions per
    second in a video, None where frame groups follow one another. `frames_apart`: the frame groups
    of a video stand apart in a prompt, with the time before each. `image_token`, `video_token`: the
    ids at which features stand.
    """

    depth: int
    width: int
    heads: int
    inner: int
    activation: str
    out: int
    image_token: int
    video_token: int
    channels: int = 3
    patch: int = 16
    frames: int = 2
    merge: int = 2
    norm: NormKind = "layer"
    gated: bool = False
    patch_bias: bool = True
    side: int | None = None
    taps: tuple[int, ...] = ()
    window: int | None = None
    whole: tuple[int, ...] = ()
    theta: float = 10_000.0
    time_step: float | None = None
    frames_apart: bool = True

    @property
    def patch_size(self) -> int:
        """The number of values of a patch."""
        return self.channels * self.frames * self.patch**2

    def features(self, grid: Grid) -> int:
        """Return how many features a picture has."""
        frames, height, width = grid
        return frames * height * width // self.merge**2
