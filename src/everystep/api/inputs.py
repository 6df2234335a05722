"""From what callers pass (rectangles, masks, embeddings) to one prompt per row, without padding.

Everything is checked here, before any compute. With an encoder there are two sides: what it reads,
and the first ids of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everystep.api.options import Options
from everystep.errors import RequestError
from everystep.outputs import encoder_states
from everystep.types import Prompt

if TYPE_CHECKING:
    from everystep.api.model import LanguageModel

Given = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderSource:
    """What stands on the encoder's side: B prompts to encode, or B states (S, E) that are done.

    `places`: (B,) where the states of each row stand in the rectangle that was passed, of `width`
    positions; `ids`: (B,) the rows of that rectangle, empty where ids are not known.
    """

    prompts: tuple[Prompt, ...] = ()
    states: tuple[Tensor, ...] = ()
    places: tuple[np.ndarray, ...] = ()
    width: int = 0
    ids: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The prompts of a call. `margins`: (B,) padded positions of what was passed; `firsts`: (B,)
    where each prompt starts in it. `width`: ids per row of the rectangle that processors and
    outputs see, 0 for embeddings only, which have `embeds_width`. `fills`: (B,) the id that a row
    is padded with, if it is. `lead`: positions of a past that was passed without its ids; `seen`:
    (B,) which of those are real, in ascending order. `source`: the encoder's side, None without
    one. `negative`: (B,) what guidance leads away from, empty if it was not given. `number`: that
    of the first prompt among all of a call whose prompts come one by one."""

    prompts: tuple[Prompt, ...]
    margins: tuple[int, ...]
    firsts: tuple[int, ...]
    width: int
    embeds_width: int = 0
    fills: tuple[int | None, ...] = ()
    lead: int = 0
    seen: tuple[np.ndarray, ...] = ()
    source: EncoderSource | None = None
    negative: tuple[Prompt, ...] = ()
    number: int = 0

    @property
    def batch(self) -> int:
        """How many rows the call has."""
        return len(self.prompts)

    @property
    def pads(self) -> tuple[int, ...]:
        """(B,) how many pad ids stand before each prompt in the rectangle of ids."""
        return self.margins if self.width else (0,) * self.batch

    @property
    def prompt_width(self) -> int:
        """Positions per row of the rectangle, whatever it is made of."""
        return self.width or self.embeds_width

    @property
    def total_width(self) -> int:
        """Positions per row of the rectangle and of what was cached before it."""
        return self.lead + self.prompt_width

    def places(self, row: int) -> np.ndarray:
        """(length,) where the positions of a row's prompt stand in a rectangle of `total_width`
        that is padded on the left, as results are."""
        prompt = self.prompts[row]
        own = self.lead + self.margins[row] + np.arange(prompt.length - prompt.before)
        return np.concatenate([self.seen[row], own]) if self.seen else own

    def visible(self, row: int, fill: int) -> np.ndarray:
        """(width,) a row's ids after its padding: what was passed there, or `fill`."""
        ids = self.prompts[row].ids
        pad = self.fills[row] if self.fills else None
        table = np.full(self.width, fill if pad is None else pad, dtype=np.int64)
        if ids is not None:
            table[self.width - len(ids) :] = ids
        return table

    def table(self, fill: int) -> np.ndarray:
        """(B, width) what is `visible` of every row."""
        return np.stack([self.visible(row, fill) for row in range(self.batch)])


def read_inputs(model: LanguageModel, given: Given, options: Options) -> Inputs:
    """The rectangle that tokens are added to, and the encoder's side of it, if there is one."""
    if model.is_encoder_decoder:
        source, batch = _read_source(model, given, options)
        return replace(_read_decoder(model, given, options, batch), source=source)
    for name in ("decoder_input_ids", "decoder_attention_mask", "encoder_outputs"):
        if given.get(name) is not None:
            what = f"{name} was given to a model without an encoder"
            raise RequestError(what, do="Pass the prompt as input_ids or inputs_embeds")
    return _read_rectangle(model, given, options)


def with_negative(model: LanguageModel, given: Given, inputs: Inputs, options: Options) -> Inputs:
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
    model: LanguageModel, given: Given, options: Options, name: str = "input_ids"
) -> Inputs:
    """Prompts of every row; padding on either side is recognised by the mask and left out.

    Without a mask, pad ids count as padding if the pad id is not an end id, as in the reference.
    """
    input_ids, pad = given.get("input_ids"), options.pad
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if input_ids is None and given.get("inputs_embeds") is None:
        # A begin token that is the pad token too was not passed as padding.
        input_ids, name, pad = _start(options.effective.bos_token_id, mask), "bos_token_id", None
    ids = None if input_ids is None else _checked_ids(input_ids, model.vocab_size, name)
    embeds = given.get("inputs_embeds")
    embeds = None if embeds is None else _checked_embeds(embeds, ids, model.core.network.spec.width)
    shape = tuple(ids.shape) if ids is not None else tuple(embeds.shape[:2])  # type: ignore[union-attr]
    real = read_mask(mask, shape)
    if mask is None and ids is not None and pad is not None and pad not in options.eos:
        real = np.not_equal(ids, pad)
    spans = [_span(row, index, mask is None) for index, row in enumerate(real)]
    prompts = tuple(
        Prompt(
            ids=None if ids is None else ids[b, first:last].copy(),
            embeds=None if embeds is None else embeds[b, first:last],
            positions=_row_positions(positions, b, first, last, shape),
        )
        for b, (first, last) in enumerate(spans)
    )
    width = shape[1]
    margins = tuple(width - (last - first) for first, last in spans)
    firsts = tuple(first for first, _ in spans)
    if ids is None:
        return Inputs(prompts, margins, firsts, width=0, embeds_width=width)
    fills = tuple(_fill(row, *span) for row, span in zip(ids, spans, strict=True))
    return Inputs(prompts, margins, firsts, width, fills=fills)


def _fill(row: np.ndarray, first: int, last: int) -> int | None:
    """The outermost id of a row's padding."""
    if first > 0:
        return int(row[0])
    return int(row[-1]) if last < len(row) else None


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


def _checked_ids(given: Any, vocabulary: int, name: str) -> np.ndarray:
    try:
        ids = torch.as_tensor(given)
    except (ValueError, TypeError, RuntimeError) as error:
        what, wanted = f"{name} is not a rectangle of ids", "a (batch, length) integer tensor"
        do = "Pad the rows to one length, with an attention_mask, or use es.generate"
        got = type(given).__name__
        raise RequestError(what, wanted=wanted, got=got, do=do) from error
    shape = tuple(ids.shape)
    if ids.dim() != 2 or 0 in shape:
        what, wanted = f"{name} has the wrong shape", "(batch, length), neither of them 0"
        do = "Add the missing dimension, for example with [None]"
        raise RequestError(what, wanted=wanted, got=shape, do=do)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        what = f"{name} has the wrong type"
        raise RequestError(what, wanted="integers", got=ids.dtype, do="Pass a tensor of ids")
    array = np.ascontiguousarray(ids.detach().cpu().numpy(), dtype=np.int64)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary:
        raise RequestError(
            f"{name} holds an id outside the vocabulary",
            wanted=f"0 to {vocabulary - 1}",
            got=low if low < 0 else high,
            do="Check that tokenizer and model belong together",
        )
    return array


def _checked_embeds(embeds: Any, ids: np.ndarray | None, width: int) -> Tensor:
    name = "inputs_embeds"
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point() or embeds.dim() != 3:
        what = f"{name} has the wrong shape or type"
        wanted = "a (batch, length, hidden) floating point tensor"
        got = tuple(embeds.shape) if isinstance(embeds, Tensor) else type(embeds).__name__
        raise RequestError(what, wanted=wanted, got=got, do="Pass embeddings")
    shape = tuple(embeds.shape)
    if shape[2] != width:
        do = "Pass what model.get_input_embeddings() or an encoder made for this model gives"
        what = f"{name} has another width than the model"
        raise RequestError(what, wanted=f"{width} values per position", got=shape[2], do=do)
    if 0 in shape:
        wanted, do = "at least one row and one position", "Pass embeddings, or leave them out"
        raise RequestError(f"{name} is empty", wanted=wanted, got=shape, do=do)
    if ids is not None and shape[:2] != ids.shape:
        do = "Pass one of them, or one embedding per id"
        what = f"{name} and input_ids differ in shape"
        raise RequestError(what, wanted=f"{ids.shape} positions", got=shape[:2], do=do)
    return embeds.detach()


def read_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(B, L) bool: which positions are real, all without a mask; RequestError for another shape."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    array = np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask)
    if array.shape != shape:
        raise RequestError(
            "attention_mask has the wrong shape",
            wanted=f"{shape}, one entry per prompt position",
            got=array.shape,
            do="Pass the mask that the tokenizer returned with the ids",
        )
    if not np.isin(array, (0, 1)).all():
        raise RequestError(
            "attention_mask holds other values than 0 and 1",
            wanted="0 or 1",
            got=array[~np.isin(array, (0, 1))][0],
            do="Pass 1 for real positions, 0 for padding",
        )
    return array.astype(bool)


def _span(row: np.ndarray, index: int, guessed: bool) -> tuple[int, int]:
    """[first, last) of the real positions of a row; `guessed` from pad ids, not from a mask."""
    real = np.flatnonzero(row)
    if len(real) == 0:
        raise RequestError(
            f"row {index} of the prompt is empty",
            wanted="one id that is not the pad id" if guessed else "one position with mask 1",
            got="none",
            do="Drop the row or give it a start token",
        )
    first, last = int(real[0]), int(real[-1]) + 1
    if last - first != len(real):
        what = f"row {index} of attention_mask has a hole"
        do = "Remove the masked positions from the prompt"
        if guessed:
            what = f"row {index} has the pad id in its middle, and no attention_mask counts it in"
            do = "Pass an attention_mask"
        raise RequestError(
            what, wanted="padding at the ends only", got=row.astype(int).tolist(), do=do
        )
    return first, last


def _row_positions(
    positions: Any, b: int, first: int, last: int, shape: tuple[int, ...]
) -> Tensor | None:
    """A row's share of position ids of any rank: (..., B, L), (..., 1, L) or (L,)."""
    if positions is None:
        return None
    do = "Pass one position per prompt position"
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dim() == 0:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise RequestError(
            "position_ids has the wrong type", wanted="a tensor of integers", got=got, do=do
        )
    of_rows = positions.shape[-2] if positions.dim() > 1 else 1
    if positions.shape[-1] != shape[1] or of_rows not in (1, shape[0]):
        wanted = f"(..., {shape[0]}, {shape[1]})"
        what = "position_ids has the wrong shape"
        raise RequestError(what, wanted=wanted, got=tuple(positions.shape), do=do)
    row = positions if positions.dim() == 1 else positions[..., b if of_rows > 1 else 0, :]
    return row[..., first:last].detach().cpu()


def _read_source(model: LanguageModel, given: Given, options: Options) -> tuple[EncoderSource, int]:
    """The encoder's side and how many rows it has."""
    if given.get("position_ids") is not None:
        what = "position_ids has no meaning for a model with an encoder"
        raise RequestError(f"{what}, which knows distances alone", do="Leave position_ids out")
    if given.get("input_ids") is not None and given.get("inputs_embeds") is not None:
        what = "inputs_embeds and input_ids both say what the encoder reads"
        raise RequestError(what, wanted="one of them", got="both", do="Leave one of them out")
    if given.get("encoder_outputs") is not None:
        states, places = _read_states(given)
        return EncoderSource(states=states, places=places), len(states)
    read = _read_rectangle(model, given, options)
    starts = zip(read.firsts, read.prompts, strict=True)
    places = tuple(first + np.arange(prompt.length) for first, prompt in starts)
    shifts = np.subtract(read.firsts, read.margins)
    ids = tuple(map(np.roll, read.table(0), shifts)) if read.width else ()
    return EncoderSource(read.prompts, (), places, read.prompt_width, ids), read.batch


def _read_states(given: Given) -> tuple[tuple[Tensor, ...], tuple[np.ndarray, ...]]:
    """(B,) encoder states (S, E) of the caller's, those of padding left out, and their places."""
    states = encoder_states(given["encoder_outputs"])
    if given.get("input_ids") is not None or given.get("inputs_embeds") is not None:
        what = "encoder_outputs and a prompt for the encoder were both given"
        raise RequestError(
            what, wanted="one of them", got="both", do="Leave input_ids and inputs_embeds out"
        )
    mask = read_mask(given.get("attention_mask"), tuple(states.shape[:2]))
    places = tuple(np.flatnonzero(row) for row in mask)
    found = tuple(row[torch.from_numpy(own)] for row, own in zip(states, places, strict=True))
    return found, places


def _read_decoder(model: LanguageModel, given: Given, options: Options, batch: int) -> Inputs:
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
