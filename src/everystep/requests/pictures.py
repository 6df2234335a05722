"""Pictures inside prompts: what a call passes of images and videos, read row by row, and their
features.

Keywords and shapes are those of transformers' processors. The placeholders among a row's
ids say which pictures it has. The tower runs once for each content of a call, one picture at a
time, and what it makes is kept with the request by absolute position (decision 25).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from everystep.cache.containers import Cache, own_half
from everystep.errors import RequestError
from everystep.models import Model
from everystep.models.vision.places import (
    AXES,
    IMAGE,
    VIDEO,
    Extent,
    kinds_of,
    misplaced,
    rope_index,
)
from everystep.models.vision.spec import Grid, VisionSpec
from everystep.requests.arrays import as_numbers
from everystep.requests.features import digest_of, injected_with
from everystep.requests.subject import Subject, weight_changes
from everystep.types import Injected, Prompt, Request

Named = Mapping[str, object]
"""What a prompt brings beside ids by keyword, none of it None."""

_NAMES = {
    IMAGE: ("pixel_values", "image_grid_thw"),
    VIDEO: ("pixel_values_videos", "video_grid_thw"),
}
_KINDS, _SECONDS = "mm_token_type_ids", "second_per_grid_ts"
_KEYWORDS = (*_NAMES[IMAGE], *_NAMES[VIDEO], _KINDS, _SECONDS)


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image or a video in a prompt.

    `places`: (n,) where its features stand, counted back from the end of the prompt. `pixels`:
    (t * h * w, values) its patches, None where what stands there is cached already.
    """

    extent: Extent
    places: np.ndarray
    pixels: Tensor | None


Pictures = tuple[Picture, ...]


def vision_of(model: Subject) -> VisionSpec | None:
    """Return how the model reads pictures, None where it does not."""
    core = model.core
    return core.tower.spec if isinstance(core, Model) and core.tower is not None else None


def picture_names(model: Subject) -> tuple[str, ...]:
    """Return the keywords of pictures, where the model reads any."""
    return _KEYWORDS if vision_of(model) is not None else ()


def prompt_names(model: Subject) -> tuple[str, ...]:
    """Return the keywords of what is encoded and read inside a prompt."""
    return (*(one.name for one in model.prompt_inputs), *picture_names(model))


# --- what is passed -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PictureRow:
    """A row of a call. `real`: (T,) which of the prompt's ids are; `cached`: how many of the first
    are cached. `place`, `begin`: the place and the position id of the first, which differ behind
    pictures."""

    prompt: Prompt
    real: np.ndarray
    cached: int = 0
    place: int = 0
    begin: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The positions that are cached before a call: `length` of each row among those that are
    passed, or `counts` (B,) of each before them; `shifts`: (B,) by how much position ids are ahead
    of places there, () for 0. One number stands for all rows."""

    length: int = 0
    counts: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()

    def row(self, number: int, prompt: Prompt, real: np.ndarray, first: int) -> PictureRow:
        """Return a row whose prompt begins at the position `first` of what is passed."""
        place = self.counts[number % len(self.counts)] if self.counts else 0
        shift = self.shifts[number % len(self.shifts)] if place and self.shifts else 0
        begin = place + shift
        return PictureRow(prompt, real, max(0, self.length - first), place, begin)

    @classmethod
    def by(cls, cache: Cache | None, seen: Tensor | None) -> Held:
        """Return what a cache holds. `seen`: (B, S) which of it is real, where what is cached is
        not passed again."""
        if cache is None or seen is None:
            return cls(0 if cache is None else int(cache.get_seq_length()))
        own, counts = own_half(cache).shifts, seen.sum(-1).tolist()
        # Beams and returned sequences have several rows each.
        shifts = () if own is None else own[:: max(1, len(own) // len(counts))].tolist()
        return cls(counts=tuple(counts), shifts=tuple(shifts))


NOTHING_HELD = Held()


def shift_of(prompt: Prompt) -> int:
    """Return by how much position ids are ahead of places behind the prompt; 0 where it has one
    axis, whose position ids are the caller's for one call alone."""
    several = prompt.positions is not None and prompt.positions.dim() > 1
    return prompt.follows - prompt.length if several else 0


def read_pictures(
    spec: VisionSpec, named: Named, rows: Sequence[PictureRow], *, placed: bool
) -> tuple[tuple[Prompt, ...], tuple[Pictures, ...]]:
    """Return the prompts with position ids, unless the caller has `placed` them, and the pictures
    of each.

    RequestError where grids, pixels and placeholders do not fit together.
    """
    given = tuple(row.prompt for row in rows)
    kinds = [kinds_of(spec, np.empty(0, np.int64) if p.ids is None else p.ids) for p in given]
    passed = any(name in named for name in _KEYWORDS if name != _KINDS)
    shifted = any(row.begin != row.place for row in rows)
    if not (passed or shifted) and all(prompt.embeds is not None for prompt in given):
        # What stands at placeholders was embedded by the caller.
        return given, ((),) * len(rows)
    aligned = all(p.ids is not None and p.hidden == p.before for p in given)
    if (passed or shifted) and not aligned:
        raise RequestError(
            "images and videos need to know where they stand",
            wanted="one id per position",
            got="inputs_embeds without ids of the same length",
            do="Pass input_ids too, or the features themselves with position_ids and deepstack",
        )
    _require_kinds(named, kinds, rows)
    extents = {kind: _extents(spec, named, kind) for kind in (IMAGE, VIDEO)}
    shares = {kind: _shares(spec, kind, extents[kind], kinds) for kind in extents}
    prompts = []
    for number, row in enumerate(rows):
        own = [shares[kind][number] for kind in extents]
        prompt = row.prompt
        if (any(own) or row.begin != row.place) and not placed:
            places = np.zeros((AXES, len(row.real)), np.int64)
            found, follows = rope_index(spec, kinds[number][row.real], *own)
            places[:, row.real] = found + row.begin
            given_places = torch.from_numpy(places)
            prompt = replace(prompt, positions=given_places, beyond=row.begin + follows)
        prompts.append(prompt)
    pictures = [_with_pixels(spec, named, kind, shares[kind], kinds, rows) for kind in extents]
    return tuple(prompts), tuple(
        (*images, *videos) for images, videos in zip(*pictures, strict=True)
    )


def _require_kinds(named: Named, kinds: list[np.ndarray], rows: Sequence[PictureRow]) -> None:
    """Refuse token types that say something else than the ids do."""
    if _KINDS not in named:
        return
    said = as_numbers(_KINDS, named[_KINDS], "(batch, length) numbers").cpu().numpy()
    said = said[None] if said.ndim == 1 else said
    do = f"Pass them as the processor returned them with the ids, or leave {_KINDS} out"
    if said.ndim != 2 or len(said) != len(rows):
        wanted = f"({len(rows)}, length)"
        raise RequestError(f"{_KINDS} has the wrong shape", wanted=wanted, got=said.shape, do=do)
    for number, (own, row) in enumerate(zip(kinds, rows, strict=True)):
        # Padding is left out on both sides, and where it was is not known here.
        theirs, ours = said[number], own[row.real]
        if np.array_equal(theirs[theirs > 0], ours[ours > 0]) and len(theirs) >= len(own):
            continue
        raise RequestError(
            f"{_KINDS} contradicts the ids of row {number}",
            wanted=f"1 at {(own == IMAGE).sum()} image placeholders, 2 at {(own == VIDEO).sum()} "
            "of videos, 0 elsewhere",
            got=theirs[:16].tolist(),
            do=do,
        )


def _shares(
    spec: VisionSpec, kind: int, extents: list[Extent], kinds: list[np.ndarray]
) -> list[list[Extent]]:
    """Return per row those whose features stand among its ids; rows have theirs one after
    another."""
    found, at = list[list[Extent]](), 0
    for own in kinds:
        count, first = int((own == kind).sum()), at
        while count > 0 and at < len(extents):
            count, at = count - spec.features(extents[at].grid), at + 1
        if count:
            wanted = sum(spec.features(one.grid) for one in extents[first:at])
            got = int((own == kind).sum())
            raise misplaced(kind, f"{wanted} placeholders in row {len(found)}", got)
        found.append(extents[first:at])
    if at < len(extents):
        raise misplaced(kind, f"placeholders for {len(extents)} grids", f"those of {at}")
    return found


def _extents(spec: VisionSpec, named: Named, kind: int) -> list[Extent]:
    """Return what the call passes as grids; RequestError for what no picture has."""
    pixels, name = _NAMES[kind]
    if name not in named:
        if pixels in named:
            do = "Pass both, as the processor returned them"
            raise RequestError(f"{pixels} was given without {name}", wanted=name, do=do)
        _seconds(spec, named, kind, [])
        return []
    found = as_numbers(name, named[name], "(n, 3) whole numbers")
    whole = not found.is_floating_point() and not found.is_complex() and found.dtype != torch.bool
    if found.dim() != 2 or found.shape[1] != 3 or not whole:
        wanted, got = "(n, 3) whole numbers: frame groups, rows, columns", tuple(found.shape)
        raise RequestError(f"{name} has the wrong form", wanted=wanted, got=got)
    grids: list[Grid] = [(t, h, w) for t, h, w in found.cpu().tolist()]
    for grid in grids:
        if min(grid) < 1 or grid[1] % spec.merge or grid[2] % spec.merge:
            raise RequestError(
                f"{name} holds a grid that no picture has",
                wanted=f"positive numbers, rows and columns in multiples of {spec.merge}",
                got=grid,
                do="Pass grids as the processor returned them",
            )
    return [Extent(*pair) for pair in zip(grids, _seconds(spec, named, kind, grids), strict=True)]


def _seconds(spec: VisionSpec, named: Named, kind: int, grids: list[Grid]) -> list[float]:
    """Return the seconds that a frame group of each picture lasts."""
    if _SECONDS in named and spec.time_step is None:
        what = f"{_SECONDS} has no effect on this model"
        raise RequestError(what, do=f"Leave {_SECONDS} out")
    if kind == IMAGE or _SECONDS not in named:
        return [1.0] * len(grids)
    found = as_numbers(_SECONDS, named[_SECONDS], f"{len(grids)} numbers").flatten().tolist()
    if len(found) != len(grids) or not all(0 <= one < 1e6 for one in found):
        wanted = f"one number of seconds for each of {len(grids)} videos"
        raise RequestError(f"{_SECONDS} does not fit the videos", wanted=wanted, got=found[:8])
    return [float(one) for one in found]


def _with_pixels(
    spec: VisionSpec,
    named: Named,
    kind: int,
    shares: list[list[Extent]],
    kinds: list[np.ndarray],
    rows: Sequence[PictureRow],
) -> list[Pictures]:
    """Return the pictures of each row with their patches: those of all, or of all that is not
    cached."""
    found = []
    for own, marks, row in zip(shares, kinds, rows, strict=True):
        places = np.flatnonzero(marks == kind)
        ends = np.cumsum([spec.features(one.grid) for one in own])
        for extent, here in zip(own, np.split(places, ends)[:-1], strict=True):
            found.append((extent, here - len(marks), bool(here[-1] >= row.cached)))
    name, grids = _NAMES[kind]
    sizes = [int(np.prod(extent.grid, dtype=object)) for extent, _, _ in found]
    everything = sum(sizes)
    fresh = sum(size for size, (_, _, is_new) in zip(sizes, found, strict=True) if is_new)
    pixels = _read_pixels(spec, name, named.get(name), everything)
    if len(pixels) not in (everything, fresh):
        also = f", or {fresh} of what is not cached" if fresh < everything else ""
        do = "Pass both as the processor returned them"
        what, wanted = f"{name} and {grids} differ in patches", f"{everything} rows{also}"
        raise RequestError(what, wanted=wanted, got=len(pixels), do=do)
    read = [len(pixels) == everything or is_new for _, _, is_new in found]
    counts = [size for size, is_read in zip(sizes, read, strict=True) if is_read]
    parts = iter(pixels.split(counts))  # type: ignore[no-untyped-call]
    pairs = zip(found, read, strict=True)
    each = iter([Picture(*one[:2], next(parts) if is_read else None) for one, is_read in pairs])
    return [tuple(next(each) for _ in own) for own in shares]


def _read_pixels(spec: VisionSpec, name: str, given: object, most: int) -> Tensor:
    """Return (n, values) patches, none where nothing is given; RequestError for what is none."""
    if given is None:
        return torch.empty(0, spec.patch_size)
    wanted = f"({most}, {spec.patch_size}) values"
    pixels = as_numbers(name, given, wanted)
    if pixels.dim() != 2 or pixels.shape[1] != spec.patch_size:
        do = "Pass them as the processor returned them, patch by patch"
        raise RequestError(
            f"{name} has the wrong shape", wanted=wanted, got=tuple(pixels.shape), do=do
        )
    if not pixels.is_floating_point():
        do = "Pass normalised values, as the processor returns them"
        raise RequestError(f"{name} has the wrong type", wanted="floats", got=pixels.dtype, do=do)
    if not bool(pixels.isfinite().all()):
        do = "Check what the picture was read from"
        raise RequestError(f"{name} holds values that are not finite", got="NaN or infinity", do=do)
    return pixels


# --- what is read ---------------------------------------------------------------------------------


Features = tuple[Tensor, Tensor | None]
"""(n, E) of a picture, and those for the first layers, where they take any."""


class Seen:
    """The pictures that a tower has encoded: each content once, whoever brings it.

    Several threads may ask at once; who brings what another encodes waits for it. The least lately
    asked for go where all take more than `most` bytes.
    """

    def __init__(self, most: int = 2**28) -> None:
        self._most = most
        self.open_locks()

    def open_locks(self) -> None:
        """Begin anew, as a forked child needs it."""
        self._lock = threading.Lock()
        self._found: OrderedDict[Hashable, Future[Features]] = OrderedDict()

    def features(self, content: Hashable, encode: Callable[[], Features]) -> Features:
        """Return what `encode` made of this content, now or before; its own error if it fails."""
        mine: Future[Features] = Future()
        try:  # an interrupt leaves nothing behind that others would wait for
            while (known := self._claimed(content, mine)) is not mine:
                if known.exception() is None:
                    return known.result()
            mine.set_result(encode())
        except BaseException as error:
            with self._lock:
                if self._found.get(content) is mine:
                    del self._found[content]
            if not mine.done():
                mine.set_exception(error)
            raise
        with self._lock:
            self._drop()
        return mine.result()

    def _claimed(self, content: Hashable, mine: Future[Features]) -> Future[Features]:
        """Return who encodes this content: another who came before, or the one that asks now."""
        with self._lock:
            known = self._found.setdefault(content, mine)
            self._found.move_to_end(content)
            return known

    def _drop(self) -> None:
        """Let the oldest go until the others fit."""
        sizes = {
            content: sum(part.nbytes for part in one.result() if part is not None)
            for content, one in self._found.items()
            if one.done() and one.exception() is None
        }
        total = sum(sizes.values())
        for content, size in sizes.items():
            if total <= self._most:
                return
            del self._found[content]
            total -= size


def with_pictures(
    model: Subject,
    requests: Sequence[Request],
    pictures: Sequence[Pictures],
    seen: Seen | None = None,
) -> tuple[Request, ...]:
    """Return the requests, whose prompts hold the features of their pictures.

    `seen`: pictures that other calls have brought, None for none.
    """
    prompts = [request.prompt for request in requests]
    pairs = zip(requests, features_of(model, prompts, pictures, seen), strict=True)
    return tuple(replace(one, prompt=injected_with(one.prompt, own)) for one, own in pairs)


def features_of(
    model: Subject,
    prompts: Sequence[Prompt],
    pictures: Sequence[Pictures],
    seen: Seen | None = None,
) -> list[list[Injected]]:
    """Return per prompt the features of its pictures, where they stand."""
    seen = seen or Seen()
    core, found = model.core, list[list[Injected]]()
    changes = weight_changes(core) if any(pictures) else 0
    for prompt, own in zip(prompts, pictures, strict=True):
        found.append([])
        for one in own:
            if one.pixels is None or not isinstance(core, Model) or core.tower is None:
                continue
            content = core.tower, changes, digest_of(one.pixels, str(one.extent.grid))
            encode = partial(core.tower.encode, one.pixels, one.extent.grid)
            features = seen.features(content, encode)
            found[-1].append(Injected(prompt.length + one.places, *features))
    return found
