"""Reading images: files, bytes, Pillow images, arrays and tensors, as arrays of bytes."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from everystep.errors import FormatError, RequestError
from everystep.files.picture_files import MOST_PIXELS, is_data_url, read_picture, require_pillow


def read_image(given: Any, most: int = MOST_PIXELS) -> np.ndarray:
    """(height, width, 3) bytes of a path, bytes, a `data:` URL, a Pillow image, an array (height,
    width, 1, 3 or 4) or (height, width), or a tensor (3, height, width).

    `most`: pixels of a file. Files are turned upright as their EXIF says. Errors as those of
    `read_picture`, and RequestError for other things; nothing is fetched from the network.
    """
    if isinstance(given, str) and not is_data_url(given) and "://" in given:
        do = "Download it, and pass the path or the bytes"
        raise RequestError("images are not fetched from the network", got=given[:100], do=do)
    if isinstance(given, torch.Tensor | np.ndarray | int | float | list | tuple | None):
        return _array(given)
    picture = read_picture(given, most)
    if isinstance(given, str | os.PathLike | bytes):
        from PIL import ImageOps

        picture = ImageOps.exif_transpose(picture)
    return np.array(picture)


def resized(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """(height, width, 3), by Pillow's bicubic rule."""
    pillow = require_pillow()
    found = pillow.fromarray(image).resize((width, height), resample=pillow.Resampling.BICUBIC)
    return np.asarray(found)


def _array(given: Any) -> np.ndarray:
    """Read an array of bytes."""
    found: np.ndarray = np.empty(0)
    if isinstance(given, torch.Tensor):
        found = _values(given)
        found = np.moveaxis(found, 0, -1) if found.ndim == 3 else found
    elif isinstance(given, np.ndarray):
        found = given
    found = found[..., None] if found.ndim == 2 else found
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[2] not in (1, 3, 4):
        raise _no_image(f"{type(given).__name__} {found.dtype} {found.shape}")
    if found.shape[0] * found.shape[1] > MOST_PIXELS:
        wanted = f"at most {MOST_PIXELS}"
        raise FormatError("the image has too many pixels", wanted=wanted, got=found.shape)
    # `np.repeat` would hold the interpreter's lock.
    return (
        found[..., :3]
        if found.shape[2] > 1
        else np.broadcast_to(found, (*found.shape[:2], 3)).copy()
    )


def _values(given: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor; RequestError where it holds others, or none."""
    if given.dtype != torch.uint8 or given.layout != torch.strided or given.is_meta:
        layout = "" if given.layout == torch.strided else f" {given.layout}"
        raise _no_image(f"a tensor {given.dtype}{layout} {tuple(given.shape)} on {given.device}")
    found: np.ndarray = given.detach().resolve_neg().cpu().numpy()
    return found


def _no_image(got: str) -> RequestError:
    return RequestError(
        "this is no image",
        wanted="a path, bytes, a Pillow image, (height, width, 3) bytes, or a tensor "
        "(3, height, width) of them",
        got=got,
        do="Pass values from 0 to 255 as uint8",
    )
