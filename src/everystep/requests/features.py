"""Prompt features: what an encoder makes of an image or of boxes, read in the middle of a prompt.

A model's `prompt_inputs` say by which keyword a value is passed, what encodes it and where the
result stands. It is encoded once per call and content, before the first forward, and kept with the
request by absolute position, so that every forward that feeds such a position reads it and no other
forward does: there is nothing to guard by the shape of a step or by the state of a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import is_integer
from everystep.errors import RequestError, shown
from everystep.models.encoders import Misfit, PromptEncoder
from everystep.nn.digests import add_tensor
from everystep.requests.arrays import as_numbers
from everystep.types import Injected, Prompt, Request
from everystep.types.given_tensors import flaw_of

Rows = Sequence[Mapping[str, Tensor]]
"""Per row of a call what its prompt inputs are given, by name."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """A keyword of every call, whose value is encoded and read inside the prompt.

    `name`: the keyword, such as "pixel_values", and key of a prompt that is a mapping. `shape`:
    that of one row's value, None for any size: (3, 224, 224), (None, 4). `encoder`: from the values
    of b rows (b, *shape) to their features, as (b, n, E) or as a list of b tensors (n, E); rows
    with values of equal shape are encoded together. Its features stand, in order, where the prompt
    has the id `token`, which need not be in the vocabulary, or at the absolute `positions`.
    `misfits`: of one row's value of that shape, what is wrong, what was wanted and what was given,
    for each thing that makes it impossible; what it names is a RequestError before any compute.
    """

    name: str
    encoder: Callable[[Tensor], Tensor | Sequence[Tensor]]
    shape: tuple[int | None, ...]
    token: int | None = None
    positions: tuple[int, ...] | None = None
    misfits: Callable[[Tensor], Iterable[Misfit]] | None = None

    def __post_init__(self) -> None:
        known = isinstance(self.shape, list | tuple)
        if not known or not all(one is None or is_integer(one) for one in self.shape):
            wanted = "a tuple of integers, and None for what differs"
            raise RequestError("a prompt input has no shape", wanted=wanted, got=shown(self.shape))
        object.__setattr__(self, "shape", tuple(self.shape))
        if self.positions is not None:
            object.__setattr__(self, "positions", tuple(map(int, self.positions)))
        for what, wrong, wanted, got in (
            ("no name", not str(self.name).isidentifier(), "a keyword", self.name),
            ("no encoder", not callable(self.encoder), "a function", type(self.encoder).__name__),
            (
                "impossible misfits",
                not (self.misfits is None or callable(self.misfits)),
                "a function",
                type(self.misfits).__name__,
            ),
            (
                "not one place where its features stand",
                (self.token is None) == (self.positions is None),
                "either token or positions",
                "none" if self.token is None else "both",
            ),
            ("an impossible token", (self.token or 0) < 0, "an id from 0 on", self.token),
            (
                "impossible positions",
                sorted({p for p in self.positions or () if p >= 0}) != list(self.positions or ()),
                "rising numbers from 0 on",
                self.positions,
            ),
        ):
            if wrong:
                what = f"the prompt input {self.name!r} has {what}"
                raise RequestError(what, wanted=wanted, got=got)

    def places(self, prompt: Prompt) -> np.ndarray:
        """Return (n,) the absolute positions of a prompt at which features are to stand."""
        if self.positions is not None:
            return np.array(self.positions, dtype=np.int64)
        if prompt.ids is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(prompt.ids == self.token) + prompt.hidden


def own_inputs(encoders: Iterable[PromptEncoder]) -> tuple[PromptInput, ...]:
    """Return the prompt inputs of a model with these encoders."""
    return tuple(
        PromptInput(one.name, one, one.shape, one.token, misfits=one.misfits) for one in encoders
    )


def require_distinct(inputs: Iterable[object], taken: Iterable[str]) -> tuple[PromptInput, ...]:
    """Return the prompt inputs; RequestError unless each has a name and a token of its own."""
    given = tuple(inputs)
    if strangers := [one for one in given if not isinstance(one, PromptInput)]:
        wanted, got = "everystep.PromptInput objects", type(strangers[0]).__name__
        raise RequestError("these are not prompt inputs", wanted=wanted, got=got)
    found = tuple(one for one in given if isinstance(one, PromptInput))
    names, known = [one.name for one in found], set(taken)
    tokens = [one.token for one in found if one.token is not None]
    for name in names:
        if name in known or names.count(name) > 1:
            what = f"the name {name!r} is taken"
            raise RequestError(what, wanted="a keyword of its own", got=name, do="Choose another")
    if len(set(tokens)) < len(tokens):
        what = "two prompt inputs stand at one token"
        raise RequestError(what, wanted="a token for each", got=tokens)
    return found


# --- what is passed -------------------------------------------------------------------------------


def read_values(declared: Sequence[PromptInput], named: Mapping[str, object], rows: int) -> Rows:
    """Return per row what of the declared inputs is given to it; () where nothing is given."""
    found: list[dict[str, Tensor]] = [{} for _ in range(rows)]
    for one in declared:
        if one.name not in named:
            continue
        for own, value in zip(found, _split(one, named[one.name], rows), strict=True):
            if value is not None:
                own[one.name] = value
    return found if any(found) else ()


def _split(one: PromptInput, given: object, rows: int) -> list[Tensor | None]:
    """Return (B,) the value of each row, None for a row without."""
    wanted = f"{rows} rows of {_shown(one.shape)}"
    if isinstance(given, list | tuple) and _by_row(given):
        each = [None if v is None else as_numbers(one.name, v, wanted) for v in given]
        # A row's value may stand in a batch of one.
        each = [v[0] if v is not None and _fits(v[:1], (1, *one.shape)) else v for v in each]
    else:
        whole = as_numbers(one.name, given, wanted)
        each = [whole] if whole.dim() == len(one.shape) and rows == 1 else list(whole)
    if len(each) != rows:
        do = "Pass one value per row of the prompt, None for rows without"
        what = f"{one.name} and the prompt differ in rows"
        raise RequestError(what, wanted=rows, got=len(each), do=do)
    for row, value in enumerate(each):
        if value is not None:
            _require_fitting(one, value, row)
    return each


def _by_row(given: Sequence[object]) -> bool:
    """Return True where each entry is a row's value: a tensor, nothing, or lists of different
    lengths."""
    lengths = {len(one) for one in given if isinstance(one, list | tuple)}
    return len(lengths) > 1 or any(isinstance(one, Tensor | None) for one in given)


def _require_fitting(one: PromptInput, value: Tensor, row: int) -> None:
    if not _fits(value, one.shape):
        what = f"{one.name} has the wrong shape in row {row}"
        raise RequestError(what, wanted=_shown(one.shape), got=tuple(value.shape))
    for what, wanted, got in one.misfits(value) if one.misfits is not None else ():
        raise RequestError(f"{one.name}, row {row}: {what}", wanted=wanted, got=got)


def _fits(value: Tensor, shape: tuple[int | None, ...]) -> bool:
    sizes = zip(value.shape, shape, strict=False)
    return value.dim() == len(shape) and all(b in (None, a) for a, b in sizes)


def _shown(shape: tuple[int | None, ...]) -> str:
    return f"({', '.join('any' if n is None else str(n) for n in shape)})"


# --- what is read ---------------------------------------------------------------------------------


def with_features(
    declared: Sequence[PromptInput], requests: Sequence[Request], values: Rows, width: int
) -> tuple[Request, ...]:
    """Return the requests, whose prompts hold the features of their rows; RequestError where counts
    do not agree. `width`: E, of the model."""
    with torch.no_grad():
        placed = placed_features(declared, [one.prompt for one in requests], values, width)
    return tuple(
        replace(request, prompt=injected_with(request.prompt, full)) if full else request
        for request, full in zip(requests, placed, strict=True)
    )


def placed_features(
    declared: Sequence[PromptInput], prompts: Sequence[Prompt], values: Rows, width: int
) -> list[list[Injected]]:
    """Return per prompt the features of what is given to its row, where they stand; as
    `with_features`. They are differentiable where gradients are on."""
    features = {one.name: _encoded(one, values, width) for one in declared if values}
    found = []
    for row, prompt in enumerate(prompts):
        parts = [_placed(one, features.get(one.name, {}).get(row), prompt, row) for one in declared]
        found.append(
            [Injected(places, part) for places, part in parts if part is not None and len(places)]
        )
    return found


def injected_with(prompt: Prompt, parts: Sequence[Injected]) -> Prompt:
    """Return the prompt, which reads these features beside those that it has; RequestError where
    two of them stand at one position."""
    if not parts:
        return prompt
    merged = _merged([*parts] if prompt.injected is None else [prompt.injected, *parts])
    if prompt.embeds is None:
        return replace(prompt, injected=merged)
    # What stands beyond the embeddings is cached, and not read again.
    inside = merged.positions >= prompt.before
    places = torch.from_numpy(merged.positions[inside])
    kept = torch.from_numpy(inside)
    embeds = prompt.embeds.clone()
    embeds[(places - prompt.before).to(embeds.device)] = merged.embeds[kept].to(embeds)
    inputs = dict(prompt.inputs)
    if merged.deepstack is not None:
        added = inputs.get(
            "deepstack",
            merged.deepstack.new_zeros(1).expand(prompt.length, *merged.deepstack.shape[1:]),
        ).clone()
        inputs["deepstack"] = added.index_add(0, places, merged.deepstack[kept].to(added))
    return replace(prompt, embeds=embeds, inputs=inputs)


def _merged(parts: list[Injected]) -> Injected:
    """Return the features of several sources, in the order of their positions."""
    places = np.concatenate([one.positions for one in parts])
    order = np.argsort(places, kind="stable")
    twice = np.flatnonzero(np.diff(places[order]) == 0)
    if len(twice):
        what = "two prompt inputs stand at one position of a prompt"
        raise RequestError(what, wanted="one each", got=int(places[order][twice[0]]))
    embeds = torch.cat([one.embeds.to(parts[0].embeds) for one in parts])
    chosen = torch.from_numpy(order).to(embeds.device)
    deep = [one.deepstack for one in parts if one.deepstack is not None]
    added = None
    if deep:
        none = embeds.new_zeros(1, *deep[0].shape[1:])
        each = [
            none.expand(len(one.positions), -1, -1) if one.deepstack is None else one.deepstack
            for one in parts
        ]
        added = torch.cat([one.to(embeds) for one in each])[chosen]
    return Injected(places[order], embeds[chosen], added)


def _encoded(one: PromptInput, values: Rows, width: int) -> dict[int, Tensor]:
    """Return the features (n, E) of each row: each content is encoded once, equal shapes
    together."""
    groups: dict[tuple[object, ...], dict[bytes, list[int]]] = {}
    for row, own in enumerate(values):
        if one.name in own:
            value = own[one.name]
            alike = groups.setdefault((value.shape, value.dtype, value.device), {})
            alike.setdefault(digest_of(value), []).append(row)
    found: dict[int, Tensor] = {}
    for contents in groups.values():
        rows = list(contents.values())
        made = one.encoder(torch.stack([values[first][one.name] for first, *_ in rows]))
        for alike_rows, features in zip(rows, _checked(one, made, len(rows), width), strict=True):
            found.update(dict.fromkeys(alike_rows, features))
    return found


def digest_of(value: Tensor, name: str = "") -> bytes:
    """Return a text that is equal for tensors of this name that are equal, bit for bit."""
    found = hashlib.sha256()
    add_tensor(found, name, value)
    return found.digest()


def _checked(one: PromptInput, made: object, count: int, width: int) -> list[Tensor]:
    """Return (count,) features (n, E) as the encoder returned them."""
    parts: list[object] = [*made] if isinstance(made, list | tuple) else []
    if isinstance(made, Tensor) and flaw_of(made) is None and made.dim() == 3:
        parts = [*made]
    each = [part for part in parts if isinstance(part, Tensor) and flaw_of(part) is None]
    right = len(each) == len(parts) == count and all(
        part.is_floating_point() and part.dim() == 2 and part.shape[1] == width for part in each
    )
    if not right:
        got: object = flaw_of(made) or tuple(getattr(made, "shape", ()))
        if isinstance(made, list | tuple):
            got = [flaw_of(part) or tuple(getattr(part, "shape", ())) for part in made]
        raise RequestError(
            f"the encoder of {one.name!r} returned something else than features",
            wanted=f"({count}, n, {width}) values, or {count} tensors (n, {width})",
            got=got,
            do="Project them to the width of the model's embeddings",
        )
    return each if torch.is_grad_enabled() else [part.detach() for part in each]


def _placed(
    one: PromptInput, features: Tensor | None, prompt: Prompt, row: int
) -> tuple[np.ndarray, Tensor | None]:
    """Return the places of features in a row's prompt, and the features; none where nothing is
    given to a row that has no place for it. What a cache holds already need not be given again."""
    if features is None and (one.positions is not None or prompt.embeds is not None):
        return np.empty(0, dtype=np.int64), None
    if one.token is not None and prompt.hidden != prompt.before:
        what = f"{one.name} has no place in row {row}, whose ids do not say what stands where"
        raise RequestError(what, wanted="one id per position", do="Pass input_ids")
    places = one.places(prompt)
    count = 0 if features is None else len(features)
    if count != len(places):
        places = places[places >= prompt.start]
    if count == len(places) and (not count or places[-1] < prompt.length):
        return places, features
    if count and count == len(places):
        what = f"{one.name} has positions beyond the prompt of row {row}"
        raise RequestError(what, wanted=f"below {prompt.length}", got=int(places[-1]))
    where = f"{len(places)} of them" if one.token is None else f"one for each id {one.token}"
    raise RequestError(
        f"row {row} of the prompt and the features of {one.name} differ in number",
        wanted=f"{len(places)} ({where})" if one.token is not None else where,
        got=count,
        do=f"Pass {one.name} for every place of it in the prompt, and for nothing else",
    )
