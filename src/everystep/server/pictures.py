"""Pictures in requests: data and nothing else, judged by their header, scaled in the front.

What goes to the engine are bytes of pixels in the size in which the model reads them, so that no
decoder ever runs in its process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from everystep.errors import FormatError, OversizeError, RequestError, UnsupportedError, shown
from everystep.files.picture_files import is_data_url
from everystep.images import PictureSettings, PictureTokenizer, ScaledImage
from everystep.images.image_arrays import read_image
from everystep.server.fields import Json, require_fields
from everystep.server.messages import Pixels
from everystep.text import Tokenizer


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Bounds of the pictures of a request.

    `pixels`: of all of them, as they are sent. `scaled`: of one as it is read, None for what the
    model's files say. `count`: how many there may be.
    """

    pixels: int = 40_000_000
    scaled: int | None = None
    count: int = 64

    def bounded(self, settings: PictureSettings) -> PictureSettings:
        """Return how pictures are prepared, with no more pixels than these limits allow."""
        most = self.scaled
        if most is None:
            return settings
        return replace(settings, least=min(settings.least, most), most=min(settings.most, most))


def shows_pictures(messages: Json) -> bool:
    """Return whether a conversation that was not looked at yet may have pictures."""
    contents = [one.get("content") for one in messages or () if isinstance(one, dict)]
    parts = [part for one in contents if isinstance(one, list) for part in one]
    return any(isinstance(one, dict) and one.get("type") in ("image_url", "image") for one in parts)


def with_scaled(
    messages: Sequence[Json], tokenizer: Tokenizer, limits: PictureLimits, *, sees: bool
) -> tuple[list[Json], list[Pixels]]:
    """Return messages whose pictures have the size in which they are read, and these pictures.

    UnsupportedError where the model takes none, RequestError for what is no picture, OversizeError
    for too many pixels. Nothing is fetched, and no file is opened.
    """
    found, pixels, left = list[Json](), list[Pixels](), limits.pixels
    for number, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list):
            found.append(message)
            continue
        parts = []
        for place, part in enumerate(content):
            where = f"messages[{number}].content[{place}]"
            if not isinstance(part, dict) or part.get("type") != "image_url":
                parts.append(part)
                continue
            if not sees or not isinstance(tokenizer, PictureTokenizer):
                raise UnsupportedError(
                    f"{where} is a picture, which this model does not read",
                    do="Ask a model that reads pictures, or send texts",
                )
            if len(pixels) == limits.count:
                wanted = f"at most {limits.count}"
                raise OversizeError("the request has too many pictures", wanted=wanted)
            image = _image(_address(part, where), left, where)
            left -= image.shape[0] * image.shape[1]
            scaled = ScaledImage(limits.bounded(tokenizer.images).scaled(image))
            parts.append({"type": "image", "image": scaled})
            height, width = scaled.pixels.shape[:2]
            pixels.append(Pixels(height, width, scaled.pixels.tobytes()))
        found.append({**message, "content": parts})
    return found, pixels


def _address(part: Mapping[str, Json], where: str) -> str:
    """Return the `data:` URL of a part; RequestError for any other address."""
    require_fields(part, where, ("type", "image_url"))
    whole = require_fields(part.get("image_url"), f"{where}.image_url", ("url", "detail"))
    if whole.get("detail") not in (None, "auto"):
        raise RequestError(
            f"{where}.image_url.detail is impossible",
            wanted="auto",
            got=shown(whole["detail"])[:40],
            do="Leave it out, or scale the picture",
        )
    address = whole.get("url")
    if not isinstance(address, str) or not is_data_url(address):
        raise RequestError(
            f"{where}.image_url.url is impossible: nothing is fetched, and no file is opened",
            wanted="data:image/png;base64,... with the picture itself",
            got=shown(address)[:60],
            do="Fetch the picture yourself, and send it",
        )
    return address


def _image(address: str, most: int, where: str) -> np.ndarray:
    """Return the picture in a `data:` URL, with at most so many pixels by its header."""
    try:
        return read_image(address, most=most)
    except FormatError as error:
        raise RequestError(f"{where}.image_url.url is impossible: {error}") from error


def patches_of(pictures: Sequence[Pixels], tokenizer: Tokenizer) -> dict[str, object]:
    """Return what a prompt has of pictures that were scaled, by name."""
    if not isinstance(tokenizer, PictureTokenizer):
        raise UnsupportedError("this model does not read pictures")
    cut = [
        tokenizer.images.patches(
            np.frombuffer(one.data, np.uint8).reshape(one.height, one.width, 3)
        )
        for one in pictures
    ]
    patches, grids = zip(*cut, strict=True)
    pixels = torch.from_numpy(np.concatenate(patches))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}
