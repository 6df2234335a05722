"""The two embedders: patches of a page's picture, and boxes of its lines.

Both are LayoutLMv3's, each followed by a projection to the width of the text model. Rows are
embedded one by one: a matrix product of several may round otherwise than that of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.models.encoders import EncoderPlan, Misfit
from everystep.models.layout.spec import FARTHEST, LayoutSpec
from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter, norm, parameter
from everystep.models.spec import NormSpec
from everystep.nn.modes import outside_autocast
from everystep.nn.norm import Norm

PADDING = -100
"""A box of which all four numbers are this is padding and has no feature."""

_NORM = NormSpec("layer", 1e-6, bias=True)
_PIXELS, _BOXES = "pixel_values", "bbox"
_PROJECTION = ("projection", "projection_bias")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PatchEncoder:
    """A picture's patches, left to right and top to bottom.

    `kernel`: (inner, channels, patch, patch). `places`: (1, 1 + patches, inner), the first one of a
    class token, which is not read here. `projection`: (E, inner).
    """

    spec: LayoutSpec
    kernel: Tensor
    kernel_bias: Tensor
    places: Tensor
    norm: Norm
    projection: Tensor
    projection_bias: Tensor

    name = _PIXELS

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of one normalised picture."""
        return self.spec.channels, self.spec.side, self.spec.side

    @property
    def token(self) -> int:
        """The id of a patch."""
        return self.spec.patch_id

    def misfits(self, value: Tensor) -> Iterator[Misfit]:
        """Yield bytes in place of normalised floats, and numbers that are none."""
        if not value.is_floating_point():
            yield "a picture is not normalised", "floats, 0 for medium grey", value.dtype
            return
        broken = (~torch.isfinite(value)).nonzero()
        if len(broken):
            place = tuple(broken[0].tolist())
            got = f"{value[place].item()} at {place}"
            yield "a pixel is not a finite number", "finite numbers", got

    def __call__(self, values: Tensor) -> Tensor:
        """Embed (b, channels, side, side) -> (b, patches, E)."""
        with outside_autocast():
            return torch.stack([self._embedded(one) for one in values])

    def _embedded(self, picture: Tensor) -> Tensor:
        x = picture.to(self.kernel.device, self.kernel.dtype)[None]
        # (1, inner, rows, columns) -> (patches, inner)
        x = F.conv2d(x, self.kernel, self.kernel_bias, self.spec.patch).flatten(2)[0].mT
        return F.linear(self.norm(x + self.places[0, 1:]), self.projection, self.projection_bias)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BoxEncoder:
    """Boxes [left, top, right, bottom] in thousandths of the page.

    `x`, `y`: (rows, coordinate) tables of edges. `h`, `w`: (rows, extent) tables of heights and
    widths. `projection`: (E, inner).
    """

    spec: LayoutSpec
    x: Tensor
    y: Tensor
    h: Tensor
    w: Tensor
    projection: Tensor
    projection_bias: Tensor

    name = _BOXES
    shape = (None, 4)

    @property
    def token(self) -> int:
        """The id of a box."""
        return self.spec.box_id

    def misfits(self, value: Tensor) -> Iterator[Misfit]:
        """Yield numbers that are not whole, and boxes that leave the page or are turned around."""
        page = f"numbers from 0 to {FARTHEST}, thousandths of the page"
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            yield "boxes are not made of whole numbers", page, value.dtype
            return
        real = (value != PADDING).any(-1)
        outside = ((value < 0) | (value > FARTHEST)).any(-1) & real
        left, top, right, bottom = value.unbind(-1)
        turned = ((left > right) | (top > bottom)) & real
        ordered = "[left, top, right, bottom], left <= right and top <= bottom"
        for what, wrong, wanted in (
            ("leaves the page", outside, page),
            ("is turned around", turned, ordered),
        ):
            for index in wrong.nonzero().flatten().tolist()[:1]:
                yield f"box {index} {what}", wanted, value[index].tolist()

    def __call__(self, values: Tensor) -> list[Tensor]:
        """Embed (b, n, 4) -> b tensors (m, E), without those of padding."""
        with outside_autocast():
            values = values.to(self.x.device, torch.int64)
            return [self._embedded(row[(row != PADDING).any(-1)]) for row in values]

    def _embedded(self, boxes: Tensor) -> Tensor:
        """Embed (m, 4) -> (m, E)."""
        left, top, right, bottom = boxes.unbind(-1)
        edges = (self.x[left], self.y[top], self.x[right], self.y[bottom])
        extents = (self.h[bottom - top], self.w[right - left])
        return F.linear(torch.cat([*edges, *extents], -1), self.projection, self.projection_bias)


def plan_embedders(spec: LayoutSpec) -> tuple[EncoderPlan, ...]:
    """Return both embedders, before their weights are loaded."""

    def patches(loader: WeightLoader) -> PatchEncoder:
        kernel, bias, places = _taken(loader, _PIXELS, "kernel", "kernel_bias", "places")
        own_norm = loader.norm(_NORM, f"{_PIXELS}.norm")
        projection = _taken(loader, _PIXELS, *_PROJECTION)
        return PatchEncoder(spec, kernel, bias, places, own_norm, *projection)

    def boxes(loader: WeightLoader) -> BoxEncoder:
        return BoxEncoder(spec, *_taken(loader, _BOXES, *"xyhw", *_PROJECTION))

    return (
        EncoderPlan(tuple(_patch_parameters(spec)), patches),
        EncoderPlan(tuple(_box_parameters(spec)), boxes),
    )


def _taken(loader: WeightLoader, name: str, *fields: str) -> Iterator[Tensor]:
    return (loader.tensor(f"{name}.{field}") for field in fields)


def _patch_parameters(spec: LayoutSpec) -> Iterator[Parameter]:
    inner, patch, at = spec.inner, spec.patch, "visual_embedder"
    kernel, places = (inner, spec.channels, patch, patch), (1, 1 + spec.patches, inner)
    yield parameter(f"{_PIXELS}.kernel", f"{at}.patch_embed.proj.weight", *kernel)
    yield parameter(f"{_PIXELS}.kernel_bias", f"{at}.patch_embed.proj.bias", inner)
    yield parameter(f"{_PIXELS}.places", f"{at}.pos_embed", *places)
    yield from norm(_NORM, f"{_PIXELS}.norm", f"{at}.norm", inner)
    yield from _projection(spec, _PIXELS, "visual_projector")


def _box_parameters(spec: LayoutSpec) -> Iterator[Parameter]:
    sizes = {"x": spec.coordinate, "y": spec.coordinate, "h": spec.extent, "w": spec.extent}
    for axis, size in sizes.items():
        name = f"layout_embedder.{axis}_position_embeddings.weight"
        yield parameter(f"{_BOXES}.{axis}", name, spec.rows, size)
    yield from _projection(spec, _BOXES, "layout_projector")


def _projection(spec: LayoutSpec, key: str, name: str) -> Iterator[Parameter]:
    yield parameter(f"{key}.projection", f"{name}.weight", spec.width, spec.inner)
    yield parameter(f"{key}.projection_bias", f"{name}.bias", spec.width)
