"""Pictures from files of untrusted sources: their header is judged before a pixel is decoded.

Pillow reads them, which the extra `vision` installs. Only formats that hold plain pixels are
opened: none of them runs another program.
"""

from __future__ import annotations

import io
import os
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from everystep.errors import EverystepError, FormatError, MissingExtraError, RequestError, shown
from everystep.files.opening import open_regular, size_of

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 80_000_000
"""What a page has at 600 dots per inch on A3, and Pillow opens without a warning."""
MOST_BYTES = 256 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
_DEEP = ("I", "F")
"""Modes with more than 8 bits per channel, of which a conversion keeps the lowest alone."""

_PAGED = ("PNG", "WEBP", "TIFF")
"""Formats that may hold several pictures. Those of a photograph belong together."""

PictureLike = Union[str, os.PathLike[str], bytes, "Image"]
"""A path, what a file holds, also as a `data:` URL in base64, or an `Image` of Pillow."""
_PIECE = 1 << 18
"""Characters that are decoded at once: decoding holds the interpreter's lock."""


def is_data_url(source: object) -> bool:
    """Return True for a text that holds a file and names none."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def read_picture(source: PictureLike, most: int = MOST_PIXELS) -> Image:
    """Read the picture in a file, or one of Pillow's, in RGB with 8 bits per channel.

    FormatError for what is no picture, is broken, holds several, or has more than `most` pixels by
    its header, before any is decoded. MissingExtraError without Pillow.
    """
    pillow = require_pillow()
    if isinstance(source, pillow.Image):
        with _refused(pillow, "the picture"):
            return _converted(source, "the picture", most)
    if isinstance(source, str) and is_data_url(source):
        source = _bytes_of_url(source)
    if isinstance(source, bytes):
        return _opened(pillow, io.BytesIO(source), "the picture", len(source), most)
    if not isinstance(source, str | os.PathLike):
        wanted, got = "a path, bytes or an Image of Pillow", type(source).__name__
        raise RequestError("this is no picture", wanted=wanted, got=got)
    path = Path(source)
    with open_regular(path) as file:
        return _opened(pillow, file, str(path), size_of(file), most)


def _bytes_of_url(url: str) -> bytes:
    """Return what a `data:` URL holds, whose length is judged before it is decoded."""
    begin, what = url[: url.find(",", 0, 1000) + 1], "the picture's data: URL"
    size = (len(url) - len(begin)) // 4 * 3
    if size > MOST_BYTES:
        wanted, got = f"at most {MOST_BYTES} bytes", f"about {size}"
        raise FormatError(f"{what} is too long", wanted=wanted, got=got)
    if not begin.lower().endswith(";base64,"):
        wanted, got = "data:image/png;base64,... or the like", shown(url[:60])
        raise FormatError(f"{what} is not in base64", wanted=wanted, got=got)
    found, left = bytearray(), ""
    try:
        for start in range(len(begin), len(url), _PIECE):
            piece = left + "".join(url[start : start + _PIECE].split())
            whole = len(piece) // 4 * 4
            found += b64decode(piece[:whole], validate=True)
            left = piece[whole:]
        if left:
            raise ValueError("characters are missing at its end")
    except ValueError as error:
        raise FormatError(f"{what} is broken", wanted="base64", got=str(error)[:200]) from error
    return bytes(found)


def _opened(pillow: Any, file: Any, name: str, size: int, most: int) -> Image:
    """Read the picture in an open file of so many bytes, with at most so many pixels."""
    if size > MOST_BYTES:
        raise FormatError(f"{name} is too large", wanted=f"at most {MOST_BYTES} bytes", got=size)
    with _refused(pillow, name), pillow.open(file, formats=FORMATS) as picture:
        return _converted(picture, name, most)


@contextmanager
def _refused(pillow: Any, name: str) -> Iterator[None]:
    """Let whatever a decoder raises be an error of the picture."""
    try:
        yield
    except EverystepError:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _too_many(name, str(error)) from error
    except Exception as error:  # decoders fail in many ways, all of them the file's fault
        raise FormatError(
            f"{name} is no picture, or a broken one",
            wanted=f"one of {', '.join(FORMATS)}, not closed yet",
            got=str(error)[:200],
        ) from error


def require_pillow() -> Any:
    """Import the `PIL.Image` module; MissingExtraError where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError.of("a picture", "Pillow", "vision") from error
    return Image


def _converted(picture: Image, name: str, most: int) -> Image:
    width, height = picture.size
    if width * height > most:
        raise _too_many(name, f"{width} * {height}", most)
    if not width * height:
        raise FormatError(f"{name} has no pixels", got=f"{width} * {height}")
    if picture.mode.split(";")[0] in _DEEP:
        do = "Convert it to 8 bits per channel first"
        raise FormatError(f"{name} is too deep", wanted="8 bits", got=picture.mode, do=do)
    if picture.format in _PAGED and _holds_several(picture):
        do = "Give each of them as a picture of its own"
        raise FormatError(f"{name} holds several pictures", wanted="one", do=do)
    return picture.convert("RGB")


def _holds_several(picture: Image) -> bool:
    try:
        picture.seek(1)
    except EOFError:
        picture.seek(0)
        return False
    return True


def _too_many(name: str, got: str, most: int = MOST_PIXELS) -> FormatError:
    do = "Scan or scale it to fewer"
    return FormatError(f"{name} has too many pixels", wanted=f"at most {most}", got=got, do=do)
