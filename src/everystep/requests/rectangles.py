"""What a call passed for the rows of its rectangle: read, checked part by part, cut row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.bridge.core import ForeignModel
from everystep.errors import InvariantError, RequestError, UnsupportedError
from everystep.models import Model
from everystep.models.dense import require_within
from everystep.outputs import encoder_states
from everystep.requests.arrays import (
    holed,
    of_row,
    read_embeds,
    read_ids,
    read_mask,
    read_named,
    read_positions,
    read_square,
    require_known,
    span_of,
)
from everystep.requests.features import read_values
from everystep.requests.inputs import EncoderSource, Inputs
from everystep.requests.options import Options
from everystep.requests.pictures import (
    NOTHING_HELD,
    Held,
    Pictures,
    read_pictures,
    shift_of,
    vision_of,
)
from everystep.requests.subject import Subject
from everystep.types import InputSpec, Prompt

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


def read_passed(model: Subject, given: Given, options: Options, name: str) -> Passed:
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


def _with_open(model: Subject, given: Given, passed: Passed) -> Passed:
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
    model: Subject, given: Given, options: Options, name: str
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


def read_inputs(
    model: Subject, given: Given, options: Options, held: Held = NOTHING_HELD
) -> Inputs:
    """The rectangle that tokens are added to, and the encoder's side of it, if there is one.

    `held`: what is cached already, where that was passed.
    """
    if model.is_encoder_decoder:
        source, batch = _read_source(model, given, options)
        return replace(_read_decoder(model, given, options, batch), source=source)
    for name in ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs"):
        if given.get(name) is not None:
            what = f"{name} was given to a model without an encoder"
            raise RequestError(what, do="Pass the prompt as input_ids or inputs_embeds")
    if options.prefix is not None:
        held = Held(counts=(len(options.prefix),), shifts=(shift_of(options.prefix.prompt),))
    return _read_rectangle(model, given, options, held=held)


def with_negative(model: Subject, given: Given, inputs: Inputs, options: Options) -> Inputs:
    """The inputs with what guidance leads away from, if it was given."""
    ids, mask = given.get("negative_prompt_ids"), given.get("negative_prompt_attention_mask")
    if ids is None:
        if mask is not None:
            what = "negative_prompt_attention_mask was given without negative_prompt_ids"
            raise RequestError(what, do="Pass both or neither")
        return inputs
    if options.effective.guidance_scale in (None, 1):
        what, got = "negative_prompt_ids has no effect", options.effective.guidance_scale
        do = "Set guidance_scale, or leave negative_prompt_ids out"
        raise RequestError(
            f"{what} without guidance_scale", wanted="guidance_scale > 1", got=got, do=do
        )
    passed = {"input_ids": ids, "attention_mask": mask}
    negative = _read_rectangle(model, passed, options, "negative_prompt_ids")
    _require_rows("negative_prompt_ids", negative.batch, inputs.batch)
    return replace(inputs, negative=negative.prompts)


def _read_rectangle(
    model: Subject,
    given: Given,
    options: Options,
    name: str = "input_ids",
    held: Held = NOTHING_HELD,
) -> Inputs:
    """Prompts of every row; padding on either side is recognised by the mask and left out.

    Without a mask, pad ids count as padding if the pad id is not an end id, as in transformers.
    """
    passed = read_passed(model, given, options, name)
    ids, (rows, width) = passed.ids, passed.shape
    guessed = given.get("attention_mask") is None
    spans = [span_of(real, row, guessed=guessed) for row, real in enumerate(passed.real)]
    place = given.get("position_ids")
    fills: tuple[int | None, ...] = ()
    if ids is not None and passed.aligned:
        fills = tuple(_fill(row, *span) for row, span in zip(ids, spans, strict=True))
    prompts = tuple(passed.prompt(row, *span) for row, span in enumerate(spans))
    pictures: tuple[Pictures, ...] = ()
    if (vision := vision_of(model)) is not None:
        own = [passed.real[row, first:last] for row, (first, last) in enumerate(spans)]
        each = enumerate(zip(prompts, own, strict=True))
        seen = [held.row(row, prompt, real, spans[row][0]) for row, (prompt, real) in each]
        prompts, pictures = read_pictures(vision, given, seen)
    return Inputs(
        prompts,
        margins=tuple(width - (last - first) for first, last in spans),
        firsts=tuple(first for first, _ in spans),
        width=0 if ids is None else ids.shape[1],
        embeds_width=0 if passed.aligned else width,
        fills=fills,
        values=read_values(model.prompt_inputs, given, rows),
        pictures=pictures,
        place=place if callable(place) else None,
        per_token=frozenset(n for n, one in model.inputs.items() if one.per == "token"),
    )


def _fill(row: np.ndarray, first: int, last: int) -> int | None:
    """The outermost id of a row's padding."""
    if first > 0:
        return int(row[0])
    return int(row[-1]) if last < len(row) else None


def _read_source(model: Subject, given: Given, options: Options) -> tuple[EncoderSource, int]:
    """The encoder's side and how many rows it has."""
    if given.get("position_ids") is not None:
        what = "position_ids has no meaning for a model with an encoder, which counts positions"
        raise RequestError(what, do="Leave position_ids out")
    if given.get("input_ids") is not None and given.get("inputs_embeds") is not None:
        what = "inputs_embeds and input_ids both say what the encoder reads"
        raise RequestError(what, wanted="one of them", got="both", do="Leave one of them out")
    if given.get("encoder_outputs") is not None:
        states, places = _read_states(model, given)
        return EncoderSource(states=states, places=places), len(states)
    core = model.core
    if core.source is not None:
        return _read_whole(core, core.source, given)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() > 2:
        do = "Pass a (batch, length) mask"
        raise RequestError("an encoder reads no 4-D attention_mask", do=do)
    read = _read_rectangle(model, given, options)
    longest = max(prompt.length for prompt in read.prompts)
    require_within(longest, core.network.most_source_positions, "the encoder")
    if options.returns("output_attentions") and any(p.mask is not None for p in read.prompts):
        what = "attentions over a prompt with holes in its mask have no place in the rectangle"
        raise UnsupportedError(what, do="Leave output_attentions out, or remove what is masked")
    starts = zip(read.firsts, read.prompts, strict=True)
    places = tuple(first + np.flatnonzero(_shown(prompt)) for first, prompt in starts)
    shifts = np.subtract(read.firsts, read.margins)
    ids = tuple(map(np.roll, read.table(0), shifts)) if read.width else ()
    return EncoderSource(read.prompts, (), places, read.prompt_width, ids), read.batch


def _read_whole(core: Model | ForeignModel, name: str, given: Given) -> tuple[EncoderSource, int]:
    """The encoder's side where it reads the input of this name, and neither ids nor embeddings; how
    many states it makes of that is known when they are encoded."""
    others = [one for one in ("input_ids", "inputs_embeds") if given.get(one) is not None]
    if given.get(name) is None or others:
        raise RequestError(
            f"the model's encoder reads {name}",
            wanted=f"{name}, as its processor returns it",
            got=", ".join(others) or f"no {name}",
            do=f"Pass {name}, and what the answer begins with as decoder_input_ids",
        )
    names = (*(one.name for one in core.inputs), "attention_mask")
    wholes = core.sources({one: given[one] for one in names if given.get(one) is not None})
    return EncoderSource(tuple(Prompt(whole=one) for one in wholes)), len(wholes)


def _shown(prompt: Prompt) -> np.ndarray:
    """(length,) bool: the positions that its mask shows."""
    if prompt.mask is None:
        return np.ones(prompt.length, dtype=bool)
    shown: np.ndarray = prompt.mask[-1].numpy()
    return shown


def _read_states(model: Subject, given: Given) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """(B,) encoder states (S, E) of the caller's, those of padding left out, and their places."""
    states = encoder_states(given["encoder_outputs"])
    names = ("input_ids", "inputs_embeds", *model.inputs)
    if both := [name for name in names if given.get(name) is not None]:
        raise RequestError(
            "encoder_outputs and a prompt for the encoder were both given",
            wanted="one of them",
            got=f"encoder_outputs and {', '.join(both)}",
            do=f"Leave {' and '.join(both)} out",
        )
    real, core = given.get("attention_mask"), model.core
    if real is not None and core.source is not None:
        real = core.real_states(torch.as_tensor(real), states.shape[1])
    mask = read_mask(real, tuple(states.shape[:2]))
    places = tuple(np.flatnonzero(row) for row in mask)
    found = tuple(row[torch.from_numpy(own)] for row, own in zip(states, places, strict=True))
    return found, places


def _read_decoder(model: Subject, given: Given, options: Options, batch: int) -> Inputs:
    """What the decoder starts from: the start token, or the caller's ids after it."""
    ids, mask = given.get("decoder_input_ids"), given.get("decoder_attention_mask")
    passed = {"input_ids": ids, "attention_mask": mask}
    if ids is None:
        passed = {"input_ids": _starts(options, batch)}
    read = _read_rectangle(model, passed, replace(options, pad=None), "decoder_input_ids")
    if ids is None:
        return read
    _require_rows("decoder_input_ids", read.batch, batch)
    return _begun(read, options)


def _starts(options: Options, batch: int) -> Tensor:
    """(B, 1) the first id of each row of the decoder."""
    starts = options.starts
    if not starts:
        raise RequestError(
            "the decoder has nothing to start from",
            wanted="decoder_start_token_id, bos_token_id or decoder_input_ids",
            got="none of them",
            do="Set decoder_start_token_id",
        )
    if len(starts) not in (1, batch):
        do = "Pass one id, or one per row of the prompt"
        what = "decoder_start_token_id does not fit the rows"
        raise RequestError(what, wanted=f"one id, or {batch}", got=len(starts), do=do)
    return torch.tensor(starts * (batch if len(starts) == 1 else 1))[:, None]


def _begun(read: Inputs, options: Options) -> Inputs:
    """The rows after their start ids, unless a row has its own already."""
    if not options.starts:
        return read
    starts = _starts(options, read.batch).numpy()
    known = [np.empty(0, np.int64) if p.ids is None else p.ids for p in read.prompts]
    if any(ids[0] == start[0] for ids, start in zip(known, starts, strict=True)):
        return read
    pairs = zip(starts, known, strict=True)
    prompts = tuple(Prompt(ids=np.concatenate(pair)) for pair in pairs)
    return replace(read, prompts=prompts, width=read.width + 1)


def _require_rows(name: str, found: int, batch: int) -> None:
    if found != batch:
        do = f"Pass one row of {name} per row of the prompt"
        raise RequestError(f"{name} and the prompt differ in rows", wanted=batch, got=found, do=do)
