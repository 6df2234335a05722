"""What the embedders of a document model are, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from everystep.models.config import Fields

FARTHEST = 1000
"""The right and lower edge of a page in the units of boxes."""

KEY = "layout_config"
_LARGE: Mapping[str, int] = {
    "hidden_size": 1024,
    "input_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "coordinate_size": 171,
    "shape_size": 170,
    "max_2d_position_embeddings": 1024,
}
"""The sizes of LayoutLMv3-large, under the names of its configuration."""
_SWITCHES = ("visual_embed", "text_embed")


@dataclass(frozen=True)
class LayoutSpec:
    """`inner`: the size of embeddings before they are projected to `width`. `side`, `patch`: of the
    square picture and of its square patches, in pixels. `coordinate`, `extent`: how many values an
    edge and a height or width of a box have, from tables of `rows`. `patch_id`, `box_id`: the
    placeholders."""

    inner: int
    width: int
    side: int
    patch: int
    channels: int
    coordinate: int
    extent: int
    rows: int
    patch_id: int
    box_id: int

    @property
    def patches(self) -> int:
        """The number of patches of a picture."""
        return (self.side // self.patch) ** 2


def read_layout(config: Mapping[str, Any]) -> LayoutSpec:
    """Read the embedders that a configuration describes; raise FormatError where they cannot be.

    Sizes stand in `layout_config` under LayoutLMv3's names, those of its large model where they
    are left out. What else such a configuration says concerns layers that are not used here.
    """
    read = Fields(config)
    given = config.get(KEY) or {}
    if not isinstance(given, Mapping):
        raise read.wrong(KEY, "an object", given)
    own = Fields({**_LARGE, **given}, f"config.json: {KEY}")
    size = {name: own.integer(name, _LARGE[name]) for name in _LARGE}
    boxes = 4 * size["coordinate_size"] + 2 * size["shape_size"]
    rows = size["max_2d_position_embeddings"]
    if boxes != size["hidden_size"]:
        wanted = f"4 * coordinate_size + 2 * shape_size = {boxes}"
        raise own.wrong("hidden_size", wanted, size["hidden_size"])
    if size["input_size"] % size["patch_size"]:
        wanted = f"a multiple of patch_size = {size['patch_size']}"
        raise own.wrong("input_size", wanted, size["input_size"])
    if rows <= FARTHEST:
        wanted = f"more than {FARTHEST}, the largest coordinate"
        raise own.wrong("max_2d_position_embeddings", wanted, rows)
    for switch in _SWITCHES:
        if not own.flag(switch, True):
            raise own.wrong(switch, "true: boxes and patches are both embedded", False)
    box_id = read.integer("spatial_position_id", least=0)
    patch_id = read.integer("img_patch_id", least=0)
    if box_id == patch_id:
        raise read.wrong("img_patch_id", f"an id other than spatial_position_id = {box_id}", box_id)
    return LayoutSpec(
        inner=size["hidden_size"],
        width=read.integer("hidden_size"),
        side=size["input_size"],
        patch=size["patch_size"],
        channels=size["num_channels"],
        coordinate=size["coordinate_size"],
        extent=size["shape_size"],
        rows=rows,
        patch_id=patch_id,
        box_id=box_id,
    )
