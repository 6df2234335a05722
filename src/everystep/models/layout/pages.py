"""A page as a document model reads it: lines of text with their boxes, and the page's picture.

Source: the demonstration of DocLayLLM, and LayoutLMv3's image processor: boxes in thousandths of
the page, cut off to whole numbers; a square picture, scaled bilinearly, with values from -1 to 1.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import FormatError, RequestError
from everystep.files.opening import read_bounded
from everystep.files.strict_json import MAX_JSON_BYTES, field, parse_object
from everystep.models.layout.spec import FARTHEST, LayoutSpec

if TYPE_CHECKING:
    from PIL.Image import Image

_BEYOND = 1e9
"""No page is as large, in any unit."""

_FORM = "a text and [left, top, right, bottom]"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, its left, top, right and bottom edge in any unit, and its number in what was
    given."""

    text: str
    box: tuple[float, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Page:
    """`size`: width and height in the unit of the boxes; None: they count the picture's pixels."""

    lines: tuple[Line, ...]
    size: tuple[float, ...] | None = None

    def boxes(self, pixels: tuple[int, int]) -> Tensor:
        """Return (n, 4) edges in thousandths of the page, in order, and none beyond it.

        `pixels`: width and height of its picture. Raise RequestError for a box that has nothing on
        the page, as where boxes and size are in different units.
        """
        width, height = self.size or pixels
        found = [_thousandths(one, width, height) for one in self.lines]
        return torch.tensor(found, dtype=torch.int64).view(-1, 4)


LinesLike = str | os.PathLike[str] | Page | Mapping[str, Any] | Iterable[Any]
"""The path of a JSON file, what it holds, or its lines: mappings, or pairs of a text and a box."""


def read_page(given: LinesLike, size: Sequence[float] | None = None) -> Page:
    """Read the lines of a page that have a text, in their order.

    A file holds `{"lines": [{"text": ..., "box": [left, top, right, bottom]}, ...]}`, and perhaps
    the `width` and `height` of the page in the unit of the boxes; other keys are left alone. A
    `size` that is given goes before those. Raise FormatError for a file that is too large or holds
    something else, RequestError for lines that are given and are none.
    """
    if isinstance(given, str | os.PathLike):
        name = str(given)
        return _page(parse_object(read_bounded(Path(given), MAX_JSON_BYTES), name), size, name)
    try:
        if isinstance(given, Page):
            return given if size is None else replace(given, size=_size(size, "lines"))
        return _page(given, size, "lines")
    except FormatError as error:
        raise RequestError(str(error)) from error


def _page(given: Any, size: Any, name: str) -> Page:
    if isinstance(given, Mapping):
        if size is None and ("width" in given or "height" in given):
            size = [given.get("width"), given.get("height")]
        given = field(dict(given), "lines", list, name)
    if not isinstance(given, Iterable):
        raise FormatError(f"{name} is no list", wanted=f"{_FORM} each", got=type(given).__name__)
    lines = [_line(one, number, name) for number, one in enumerate(given)]
    own = None if size is None else _size(size, name)
    return Page(tuple(one for one in lines if one.text.strip()), own)


def _size(given: Any, name: str) -> tuple[float, ...]:
    what = f"{name}: the size of the page"
    size = _numbers(given, 2, what)
    if min(size) <= 0:
        raise FormatError(f"{what} is impossible", wanted="more than 0", got=size)
    return size


def _line(given: Any, number: int, name: str) -> Line:
    where = f"{name}: line {number}"
    if isinstance(given, Mapping):
        given = (given.get("text"), given.get("box"))
    if not isinstance(given, list | tuple) or len(given) != 2 or not isinstance(given[0], str):
        raise FormatError(f"{where} is none", wanted=_FORM, got=reprlib.repr(given))
    return Line(given[0], _numbers(given[1], 4, f"{where}: the box"), number)


def _numbers(given: Any, count: int, name: str) -> tuple[float, ...]:
    """Return so many finite numbers; raise FormatError for anything else."""
    values = given.tolist() if isinstance(given, np.ndarray | Tensor) else given
    right = isinstance(values, list | tuple) and len(values) == count
    if not right or not all(type(one) in (int, float) and abs(one) < _BEYOND for one in values):
        wanted = f"{count} numbers"
        raise FormatError(f"{name} is impossible", wanted=wanted, got=reprlib.repr(given))
    return tuple(map(float, values))


def _thousandths(line: Line, width: float, height: float) -> list[int]:
    x, y = (sorted(line.box[side::2]) for side in (0, 1))
    if x[1] < 0 or y[1] < 0 or x[0] > width or y[0] > height:
        raise RequestError(
            f"the box of line {line.number} lies beyond the page",
            wanted=f"a box within {width:g} * {height:g}",
            got=[round(edge, 3) for edge in line.box],
            do="Give the width and height of the page in the unit of the boxes",
        )
    edges = (x[0] / width, y[0] / height, x[1] / width, y[1] / height)
    return [min(max(int(FARTHEST * edge), 0), FARTHEST) for edge in edges]


def pixels_of(picture: Image, spec: LayoutSpec) -> Tensor:
    """Return (3, side, side) float32, from -1 to 1."""
    from PIL.Image import Resampling

    scaled = picture.resize((spec.side, spec.side), Resampling.BILINEAR)
    values = torch.from_numpy(np.array(scaled, dtype=np.float32))
    return (values.permute(2, 0, 1) / 255 - 0.5) / 0.5
