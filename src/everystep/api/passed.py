"""What a call passed for the rows of its rectangle: read, checked part by part, cut row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everystep.api.arrays import (
    holed,
    of_row,
    read_embeds,
    read_ids,
    read_mask,
    read_named,
    read_positions,
    read_square,
    require_known,
)
from everystep.api.options import Options
from everystep.api.pictures import vision_of
from everystep.bridge.core import ForeignModel
from everystep.errors import InvariantError, RequestError
from everystep.types import InputSpec, Prompt

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """What a call passed for B rows of L positions, each part checked by itself.

    `ids`: (B, T), of any T beside `embeds` (B, L, E). `real`: (B, L) bool, `square`: (B, 1 or H, L,
    L) bool or None. `positions`: (..., B or 1, L) or None. `named`: what the model declares.
    `wholes`: (B,) what each prompt is given as a whole, () for nothing. `place`: what finds the
    positions of such a prompt.
    """

    shape: tuple[int, int]
    ids: np.ndarray | None
    embeds: Tensor | None
    real: np.ndarray
    square: Tensor | None
    positions: Tensor | None
    named: dict[str, tuple[InputSpec, Tensor]]
    wholes: Sequence[Mapping[str, Tensor]] = ()
    place: Callable[[Prompt], Prompt] | None = None

    @property
    def aligned(self) -> bool:
        """Whether every position has an id."""
        return self.ids is not None and self.ids.shape == self.shape

    def prompt(self, row: int, first: int, last: int) -> Prompt:
        """The positions [first, last) of a row."""
        mask = None if self.square is None else self.square[row]
        places: Tensor | None = None
        if mask is None and (hidden := holed(self.real[row, first:last])) is not None:
            mask, places = hidden
        if self.positions is not None:
            places = of_row(self.positions, row)[..., first:last]
        ids = None if self.ids is None else self.ids[row].copy()
        prompt = Prompt(
            ids=ids[first:last] if ids is not None and self.aligned else ids,
            embeds=None if self.embeds is None else self.embeds[row, first:last],
            positions=places,
            inputs={
                name: values[row, first:last] if spec.per == "token" else values[row]
                for name, (spec, values) in self.named.items()
            },
            mask=mask,
            whole=self.wholes[row] if self.wholes else {},
        )
        return prompt if self.place is None else self.place(prompt)


def with_prompt(given: Given, prompt: object, name: str) -> dict[str, Any]:
    """The keywords of a call with its first argument, the prompt, by `name`.

    RequestError for a mapping, and for a prompt that was given twice.
    """
    if isinstance(prompt, Mapping):
        raise RequestError(
            "the first argument is a mapping",
            wanted="ids",
            got=type(prompt).__name__,
            do="Pass its entries: generate(**batch)",
        )
    if prompt is not None and given.get(name) is not None:
        what = f"the prompt was given twice: as the first argument and as {name}"
        raise RequestError(what, do=f"Pass it once, as {name}")
    return {**given, name: given.get(name) if prompt is None else prompt}


def read_passed(model: LanguageModel, given: Given, options: Options, name: str) -> Passed:
    """What these keywords say of the rows; errors call the ids by `name`."""
    ids, embeds, pad = _read_content(model, given, options, name)
    shape = ids.shape if embeds is None else embeds.shape[:2]  # type: ignore[union-attr]
    rows, length = (int(size) for size in shape)
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    square = None
    if isinstance(mask, Tensor) and mask.dim() > 2:
        square, mask = read_square(mask, rows, length), torch.ones(rows, length)
    real = read_mask(mask, (rows, length))
    aligned = ids is not None and ids.shape == shape
    if mask is None and aligned and pad is not None and pad not in options.eos:
        real = np.not_equal(ids, pad)  # type: ignore[arg-type]
    if callable(positions):
        positions = None
    elif positions is not None:
        positions = read_positions(positions, rows, length)
        if positions.dim() == 3 and len(positions) == 4 and vision_of(model) is not None:
            positions = positions[1:]  # before them the places in the row, as transformers has it
    named = {
        name: (spec, read_named(spec, given[name], rows, length))
        for name, spec in model.inputs.items()
        if given.get(name) is not None and not spec.open
    }
    passed = Passed((rows, length), ids, embeds, real, square, positions, named)
    return _with_open(model, given, passed)


def _with_open(model: LanguageModel, given: Given, passed: Passed) -> Passed:
    """The same with inputs whose shape is known at the call alone."""
    specs = {n: s for n, s in model.inputs.items() if s.open and given.get(n) is not None}
    if not specs:
        return passed
    core = model.core
    if not isinstance(core, ForeignModel):
        raise InvariantError("only a wrapped model reads inputs of open shapes")
    rows, length = passed.shape
    known = [np.empty(0, dtype=np.int64)] * rows
    if passed.aligned and passed.ids is not None:
        known = [ids[real] for ids, real in zip(passed.ids, passed.real, strict=True)]
    media = core.media({name: given[name] for name in specs}, known, length)
    named = passed.named | {name: (specs[name], one) for name, one in media.tokens.items()}
    place = core.placed if given.get("position_ids") is None else None
    return replace(passed, named=named, wholes=media.wholes, place=place)


def _read_content(
    model: LanguageModel, given: Given, options: Options, name: str
) -> tuple[np.ndarray | None, Tensor | None, int | None]:
    """(B, T) ids, (B, L, E) embeddings, either of them or both, and the id that is padding."""
    ids, embeds, pad = given.get("input_ids"), given.get("inputs_embeds"), options.pad
    if ids is None and embeds is None:
        # A begin token that is the pad token too was not passed as padding.
        bos = options.effective.bos_token_id
        ids, name, pad = _start(bos, given.get("attention_mask")), "bos_token_id", None
    array = None if ids is None else read_ids(ids, name, empty=embeds is not None)
    found = None if embeds is None else read_embeds(embeds, array, model.width)
    if array is not None:
        tokens = [one.token for one in model.prompt_inputs if one.token is not None]
        known = array[~np.isin(array, tokens)]
        require_known(known, model.vocab_size if found is None else None, name)
        if found is None or array.shape[1]:
            return array, found, pad
    return None, found, pad


def _start(bos: int | None, mask: Any) -> Tensor:
    """(B, 1) the begin token, for as many rows as a mask has, or for one."""
    if bos is None:
        raise RequestError(
            "there is nothing to start from",
            wanted="input_ids, inputs_embeds, or a bos_token_id in the generation config",
            got="none of them",
            do="Pass input_ids",
        )
    rows = mask.shape[0] if isinstance(mask, Tensor) and mask.dim() == 2 else 1
    return torch.full((rows, 1), bos)
