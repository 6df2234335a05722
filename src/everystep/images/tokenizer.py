"""A tokenizer that takes images and videos beside text.

It puts as many placeholders into the text as a picture has features, and returns the patches beside
the ids, under the names of transformers' processors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import tokenizers
import torch

from everystep.errors import FormatError, RequestError, UnsupportedError, shown
from everystep.files.atomic import write_atomic
from everystep.files.opening import as_path
from everystep.files.picture_files import is_data_url
from everystep.images.image_arrays import read_image
from everystep.images.picture_settings import IMAGES, VIDEOS, PictureSettings, read_picture_settings
from everystep.images.sizes import sampled_frames, times_of
from everystep.text import Tokenizer
from everystep.text.batch import BatchEncoding
from everystep.text.call_arguments import as_texts
from everystep.text.message_parts import parts_of
from everystep.text.native import checked_text
from everystep.text.template import RenderedChat
from everystep.text.tokenizer_folder import read_folder
from everystep.text.tokenizer_settings import Settings, described

IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
START, END = "<|vision_start|>", "<|vision_end|>"
_FPS = 24.0


@dataclass(frozen=True, eq=False)
class ScaledImage:
    """An image (height, width, 3) of bytes that already has the size in which it is read."""

    pixels: np.ndarray


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A picture, and what stands for it in a text; `cut`: its patches and its grid, which are made
    when somebody wants more than the ids."""

    cut: Callable[[], tuple[np.ndarray, tuple[int, int, int]]]
    text: str


@dataclass(frozen=True, eq=False)
class _Pictures:
    """All pictures of a call; `kinds`: what an id says that stands there."""

    images: list[_Prepared]
    videos: list[_Prepared]
    kinds: Mapping[int, int]

    def filled(self, chats: Sequence[RenderedChat]) -> list[RenderedChat]:
        """Put what stands for each picture at its place in the texts; RequestError for other
        counts."""
        return _filled(_filled(chats, IMAGE_PAD, self.images), VIDEO_PAD, self.videos)

    def add_to(self, encoding: BatchEncoding) -> None:
        """Puts what stands at each id beside the ids, and the patches and grids."""
        encoding["mm_token_type_ids"] = _kinds(encoding["input_ids"], self.kinds)
        for names, own in (
            (("pixel_values", "image_grid_thw"), self.images),
            (("pixel_values_videos", "video_grid_thw"), self.videos),
        ):
            if own:
                patches, grids = zip(*(one.cut() for one in own), strict=True)
                encoding[names[0]] = torch.from_numpy(np.concatenate(patches))
                encoding[names[1]] = torch.tensor(grids)


class PictureTokenizer(Tokenizer):
    """A tokenizer whose texts and chats may show pictures.

    `images`, `videos`: how each are prepared; `times`: whether the frame groups of a video stand in
    the text with their times before them. In a chat a picture is a part of a message's content:
    `{"type": "image", "image": ...}`, or `{"type": "video", "video": [frames], "fps": ...}`. The
    form `{"type": "image_url", "image_url": {"url": "data:..."}}` holds an image too. A chat
    template's encoding then holds what that of a call with pictures holds.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Settings,
        images: PictureSettings,
        videos: PictureSettings,
        times: bool = True,
    ) -> None:
        super().__init__(backend, settings)
        self.images, self.videos, self.times = images, videos, times
        known = self.get_vocab()
        if missing := [one for one in (IMAGE_PAD, VIDEO_PAD, START, END) if one not in known]:
            what = "the vocabulary has no tokens for pictures"
            raise FormatError(what, wanted=", ".join(missing), got="none of that name")

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], *, times: bool = True) -> PictureTokenizer:
        """Return the tokenizer of a folder that says how pictures are prepared; FileError
        otherwise."""
        found = read_picture_settings(as_path(folder))
        if found is None:
            raise FormatError(f"{folder} does not say how images are prepared")
        return cls(*read_folder(as_path(folder)), *found, times)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> tuple[str, ...]:
        """Writes the files of the Hugging Face layout, how pictures are prepared among them, and
        returns their paths."""
        paths = [as_path(folder) / name for name in (IMAGES, VIDEOS)]
        for path, own in zip(paths, (self.images, self.videos), strict=True):
            write_atomic(path, json.dumps(own.to_dict(), indent=2).encode(), follows=False)
        return (*super().save_pretrained(folder), *map(str, paths))

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        *,
        images: Any = None,
        videos: Any = None,
        video_fps: Any = None,
        **options: Any,
    ) -> BatchEncoding:
        """Columns of ids as a tokenizer gives them; with pictures also tensors of their patches and
        grids, and what stands at each id (`mm_token_type_ids`).

        `images`: one, or a list of all images of the texts in order; see `read_image`. `videos`:
        one, or a list of them, each a list of all its frames. `video_fps`: frames per second of
        each, 24 if nothing is said. Each `<|image_pad|>` and `<|video_pad|>` of a text stands for
        one of them. RequestError where counts differ.
        """
        if images is None and videos is None:
            return super().__call__(text, text_pair, **options)
        if text_pair is not None or text is None:
            raise RequestError("pictures stand in a text of their own", wanted="text, no text_pair")
        films = _films(videos)
        shown = self._prepared(_listed(images), films, _rates(video_fps, len(films)))
        given, single = as_texts(text, None)
        chats = [RenderedChat(checked_text(one)) for one in given]
        texts = [chat.text for chat in shown.filled(chats)]
        encoding = super().__call__(texts[0] if single else texts, **options)
        shown.add_to(encoding)
        return encoding

    def _shown(self, chats: list[Sequence[Any]]) -> tuple[list[Sequence[Any]], _Pictures | None]:
        images, videos, rates = _pictures(chats)
        if not images and not videos:
            return chats, None
        plain = [[_without_pictures(message) for message in chat] for chat in chats]
        return list[Sequence[Any]](plain), self._prepared(images, _films(videos or None), rates)

    def _prepared(self, images: list[Any], films: list[Any], rates: list[float]) -> _Pictures:
        return _Pictures(
            [self._image(one) for one in images],
            [self._video(*pair) for pair in zip(films, rates, strict=True)],
            {self.convert_tokens_to_ids(IMAGE_PAD): 1, self.convert_tokens_to_ids(VIDEO_PAD): 2},
        )

    def _image(self, given: Any) -> _Prepared:
        own = self.images
        scaled = given.pixels if isinstance(given, ScaledImage) else own.scaled(read_image(given))
        return _Prepared(partial(own.patches, scaled), IMAGE_PAD * own.features(scaled))

    def _video(self, frames: Sequence[Any], source_fps: float) -> _Prepared:
        own = self.videos
        if not self.times:
            raise UnsupportedError(
                "videos are not prepared for a model of this family",
                wanted="images, or a model whose videos have times in the text (Qwen3-VL)",
                do="Pass pixel_values_videos and video_grid_thw, as its own processor returns them",
            )
        chosen = sampled_frames(len(frames), source_fps, own.fps)
        patches, grid = own.video([read_image(frames[index]) for index in chosen])
        count = grid[1] * grid[2] // own.merge**2
        group = f"{START}{VIDEO_PAD * count}{END}"
        times = times_of(chosen, source_fps, own.frames)
        text = "".join(f"<{at:.1f} seconds>{group}" for at in times)
        return _Prepared(lambda: (patches, grid), text)

    def __repr__(self) -> str:
        return described(self, "PictureTokenizer")


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True for a conversation that shows any."""
    images, videos, _ = _pictures([messages])
    return bool(images or videos)


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


def _films(given: Any) -> list[Any]:
    """Videos, each of several frames."""
    if given is None:
        return []
    several = isinstance(given, list | tuple) and given and _is_film(given[0])
    films = list(given) if several else [given]
    if not all(_is_film(film) and len(film) for film in films):
        raise RequestError(
            "a video is not a list of frames",
            wanted="a list of images, or an array (frames, height, width, 3) of bytes",
            got=type(given).__name__,
            do="Read its frames first, with the tool that you have for that",
        )
    return films


def _is_film(one: Any) -> bool:
    return isinstance(one, list | tuple) or (isinstance(one, np.ndarray) and one.ndim == 4)


def _rates(given: Any, count: int) -> list[float]:
    """(count,) frames per second of each video."""
    rates = [_FPS if given is None else given] * count if not isinstance(given, list) else given
    fits = len(rates) == count and all(type(one) in (int, float) and one > 0 for one in rates)
    if not fits:
        wanted = f"a positive number, or {count} of them"
        raise RequestError("video_fps does not fit the videos", wanted=wanted, got=shown(given))
    return [float(one) for one in rates]


_KINDS = {"image": "image", "image_url": "image", "video": "video"}
"""Types of parts that show something -> what they show; the second is that of OpenAI's calls."""
_NOUNS = {"image": "an image", "video": "a video"}


def _pictures(chats: Sequence[Any]) -> tuple[list[Any], list[Any], list[float]]:
    """Return all images, all videos and their rates, in the order of the messages."""
    images, videos, rates = list[Any](), list[Any](), list[float]()
    for part in chain.from_iterable(map(parts_of, chats)):
        kind = _kind(part)
        if kind is None:
            continue
        given = _address(part)
        if given is None:
            given = next((part[key] for key in (kind, "path") if part.get(key) is not None), None)
        if given is None:
            do = f"Pass it as {{'type': {kind!r}, {kind!r}: ...}}"
            raise RequestError(f"a message announces {_NOUNS[kind]} and holds none", do=do)
        (images if kind == "image" else videos).append(given)
        if kind == "video":
            rates += _rates(part.get("fps"), 1)
    return images, videos, rates


def _kind(part: object) -> str | None:
    """Return what a part of a message shows, None where it shows nothing."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


def _address(part: Mapping[str, Any]) -> str | None:
    """Return the `data:` URL that a part gives in place of a picture, None where it gives none.

    Any other address is refused, a path too: whoever writes a message may name what is not his.
    """
    given, whole = part.get("url"), part.get("image_url")
    if whole is not None:
        if isinstance(whole, Mapping) and whole.get("detail") not in (None, "auto"):
            do, got = "Leave detail out, or scale the picture", shown(whole["detail"])
            raise RequestError("pictures have no detail to choose", got=got, do=do)
        given = whole.get("url") if isinstance(whole, Mapping) else whole
    if given is None or is_data_url(given):
        return given
    raise RequestError(
        "pictures are not fetched from addresses, and no file is opened for one",
        wanted="a data: URL with the picture in base64, or {'type': 'image', 'image': ...}",
        got=shown(given)[:100],
        do="Fetch it yourself, and pass its bytes or an open picture as the image",
    )


def _without_pictures(message: Any) -> Any:
    """Return the message as a template reads it: of a picture it needs to know that it is there."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = [part if (kind := _kind(part)) is None else {"type": kind} for part in content]
    return {**message, "content": tuple(parts) if isinstance(content, tuple) else parts}


def _filled(
    chats: Sequence[RenderedChat], name: str, pictures: Sequence[_Prepared]
) -> list[RenderedChat]:
    places = sum(chat.text.count(name) for chat in chats)
    if places != len(pictures):
        raise RequestError(
            f"texts and pictures do not fit: each {name} stands for one",
            wanted=f"{places} of them",
            got=len(pictures),
            do="Pass one picture per placeholder, in their order",
        )
    # Every frame group of a video has its own marks, which replace those around the whole.
    around = f"{re.escape(START)}{re.escape(name)}{re.escape(END)}|" if name == VIDEO_PAD else ""
    place, each = re.compile(around + re.escape(name)), iter(pictures)
    return [
        chat.replaced([(*one.span(), next(each).text) for one in place.finditer(chat.text)])
        for chat in chats
    ]


def _kinds(ids: Any, kinds: Mapping[int, int]) -> Any:
    """Tell what stands at each id, in the form that the ids have."""
    if isinstance(ids, list):
        return [_kinds(one, kinds) if isinstance(one, list) else kinds.get(one, 0) for one in ids]
    found = torch.zeros_like(torch.as_tensor(ids))
    for id, kind in kinds.items():
        found[torch.as_tensor(ids) == id] = kind
    return found if isinstance(ids, torch.Tensor) else found.numpy()
