"""From what callers pass (rectangles, masks, embeddings) to one prompt per row, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The prompts of a call. `pads`: (B,) how many pad ids stand before each in the rectangle that
    processors and outputs see; `width`: ids per row of that rectangle (0 for embeddings only).
    `fills`: (B,) the id that a row is padded with, if it is; `margins`: (B,) padded positions of
    what was passed, `pads` unless it is embeddings only; `firsts`: (B,) where each prompt starts in
    it. `behind`: positions of a past that was passed without its ids; `seen`: (B,) which of those
    are real, in ascending order."""

    prompts: tuple[Prompt, ...]
    pads: tuple[int, ...]
    width: int
    embeds_width: int
    fills: tuple[int | None, ...] = ()
    margins: tuple[int, ...] = ()
    firsts: tuple[int, ...] = ()
    behind: int = 0
    seen: tuple[np.ndarray, ...] = ()

    @property
    def batch(self) -> int:
        """How many rows the call has."""
        return len(self.prompts)

    @property
    def prompt_width(self) -> int:
        """Positions per row of the rectangle, whatever it is made of."""
        return self.width or self.embeds_width

    @property
    def total_width(self) -> int:
        """Positions per row of the rectangle and of what was cached before it."""
        return self.behind + self.prompt_width

    def places(self, row: int) -> np.ndarray:
        """(length,) where the positions of a row's prompt stand in a rectangle of `total_width`
        that is padded on the left, as results are."""
        prompt, margin = self.prompts[row], (self.margins or self.pads)[row]
        own = self.behind + margin + np.arange(prompt.length - prompt.before)
        return np.concatenate([self.seen[row], own]) if self.seen else own

    def passed(self, row: int) -> np.ndarray:
        """(length,) where the positions of a row's prompt stand in what was passed."""
        return self.firsts[row] + np.arange(self.prompts[row].length)

    def rectangle(self, row: int) -> np.ndarray:
        """(width,) a row's ids as they were passed, padding included; empty for embeddings only."""
        table = self.visible(row, 0)
        return np.roll(table, self.firsts[row] - self.pads[row])

    def visible(self, row: int, fill: int) -> np.ndarray:
        """(width,) a row's ids behind its padding: what was passed there, or `fill`."""
        ids = self.prompts[row].ids
        pad = self.fills[row] if self.fills else None
        table = np.full(self.width, fill if pad is None else pad, dtype=np.int64)
        if ids is not None:
            table[self.width - len(ids) :] = ids
        return table


def read_inputs(
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    *,
    pad: int | None,
    eos: tuple[int, ...],
    bos: int | None,
    vocabulary: int,
    width: int | None = None,
    name: str = "input_ids",
) -> Inputs:
    """Prompts of every row; padding on either side is recognised by the mask and left out.

    Without a mask, pad ids count as padding if the pad id is not an end id, as in the reference.
    `width`: that of the model's embeddings.
    """
    if input_ids is None and inputs_embeds is None:
        # A begin token that is the pad token too was not passed as padding.
        input_ids, name, pad = _start(bos, attention_mask), "bos_token_id", None
    ids = None if input_ids is None else _checked_ids(input_ids, vocabulary, name)
    embeds = None if inputs_embeds is None else _checked_embeds(inputs_embeds, ids, width)
    shape = tuple(ids.shape) if ids is not None else tuple(embeds.shape[:2])  # type: ignore[union-attr]
    mask = read_mask(attention_mask, shape)
    if attention_mask is None and ids is not None:
        mask = _without_padding(ids, pad, eos)
    spans = [_span(row, index, attention_mask is None) for index, row in enumerate(mask)]
    prompts = [
        Prompt(
            ids=None if ids is None else ids[b, first:last].copy(),
            embeds=None if embeds is None else embeds[b, first:last],
            positions=_row_positions(position_ids, b, first, last, shape),
        )
        for b, (first, last) in enumerate(spans)
    ]
    width = shape[1]
    pads = tuple(width - (last - first) for first, last in spans)
    firsts = tuple(first for first, _ in spans)
    if ids is None:
        none = (0,) * len(prompts)
        return Inputs(tuple(prompts), none, 0, width, margins=pads, firsts=firsts)
    fills = tuple(_fill(row, span) for row, span in zip(ids, spans, strict=True))
    return Inputs(tuple(prompts), pads, width, 0, fills, pads, firsts)


def _fill(row: np.ndarray, span: tuple[int, int]) -> int | None:
    """The outermost id of a row's padding."""
    first, last = span
    if first > 0:
        return int(row[0])
    return int(row[-1]) if last < len(row) else None


def _start(bos: int | None, mask: Any) -> Tensor:
    """(B, 1) the begin token, for as many rows as a mask has, or for one."""
    if bos is None:
        raise RequestError(
            message(
                "there is nothing to start from",
                wanted="input_ids, inputs_embeds, or a bos_token_id in the generation config",
                got="none of them",
                do="Pass input_ids",
            )
        )
    rows = mask.shape[0] if isinstance(mask, Tensor) and mask.dim() == 2 else 1
    return torch.full((rows, 1), bos)


def _checked_ids(ids: Any, vocabulary: int, name: str) -> np.ndarray:
    if not isinstance(ids, Tensor):
        try:
            ids = torch.as_tensor(ids)
        except (ValueError, TypeError) as error:
            raise RequestError(
                message(
                    f"{name} is not a rectangle of ids",
                    wanted="a (batch, length) integer tensor",
                    got=type(ids).__name__,
                    do="Pad the rows to one length, with an attention_mask, or use es.generate",
                )
            ) from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        _refuse(f"{name} has the wrong type", "integers", ids.dtype, "Pass a tensor of ids")
    if ids.dim() != 2 or ids.shape[0] == 0 or ids.shape[1] == 0:
        _refuse(
            f"{name} has the wrong shape",
            "(batch, length), neither of them 0",
            tuple(ids.shape),
            "Add the missing dimension, for example with [None]",
        )
    array = np.ascontiguousarray(ids.detach().cpu().numpy(), dtype=np.int64)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocabulary:
        _refuse(
            f"{name} holds an id outside the vocabulary",
            f"0 to {vocabulary - 1}",
            low if low < 0 else high,
            "Check that tokenizer and model belong together",
        )
    return array


def _checked_embeds(embeds: Any, ids: np.ndarray | None, width: int | None) -> Tensor:
    if not isinstance(embeds, Tensor) or not embeds.is_floating_point() or embeds.dim() != 3:
        got = tuple(embeds.shape) if isinstance(embeds, Tensor) else type(embeds).__name__
        _refuse(
            "inputs_embeds has the wrong shape or type",
            "a (batch, length, hidden) floating point tensor",
            got,
            "Pass embeddings",
        )
    if width is not None and embeds.shape[2] != width:
        _refuse(
            "inputs_embeds has another width than the model",
            f"{width} values per position",
            embeds.shape[2],
            "Pass what model.get_input_embeddings() or an encoder made for this model gives",
        )
    if 0 in embeds.shape:
        _refuse(
            "inputs_embeds is empty",
            "at least one row and one position",
            tuple(embeds.shape),
            "Pass embeddings, or leave inputs_embeds out",
        )
    if ids is not None and tuple(embeds.shape[:2]) != ids.shape:
        _refuse(
            "inputs_embeds and input_ids differ in shape",
            f"{ids.shape} positions",
            tuple(embeds.shape[:2]),
            "Pass one of them, or one embedding per id",
        )
    return embeds.detach()


def _without_padding(ids: np.ndarray, pad: int | None, eos: tuple[int, ...]) -> np.ndarray:
    """(B, L) which ids are no padding, as far as they alone can tell."""
    if pad is None or pad in eos:
        return np.ones(ids.shape, dtype=bool)
    return np.not_equal(ids, pad)


def read_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """(B, L) bool: which positions are real, all without a mask; RequestError for another shape."""
    if mask is None:
        return np.ones(shape, dtype=bool)
    array = np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask)
    if array.shape != shape:
        _refuse(
            "attention_mask has the wrong shape",
            f"{shape}, one entry per prompt position",
            array.shape,
            "Pass the mask that the tokenizer returned with the ids",
        )
    if not np.isin(array, (0, 1)).all():
        _refuse(
            "attention_mask holds other values than 0 and 1",
            "0 or 1",
            array[~np.isin(array, (0, 1))][0],
            "Pass 1 for real positions, 0 for padding",
        )
    return array.astype(bool)


def _span(row: np.ndarray, index: int, guessed: bool) -> tuple[int, int]:
    """[first, last) of the real positions of a row; `guessed` from pad ids, not from a mask."""
    real = np.flatnonzero(row)
    if len(real) == 0:
        _refuse(
            f"row {index} of the prompt is empty",
            "one id that is not the pad id" if guessed else "at least one position with mask 1",
            "none",
            "Drop the row or give it a start token",
        )
    first, last = int(real[0]), int(real[-1]) + 1
    if last - first != len(real):
        _refuse(
            f"row {index} has the pad id in its middle, and no attention_mask says that it counts"
            if guessed
            else f"row {index} of attention_mask has a hole",
            "padding at the ends only",
            row.astype(int).tolist(),
            "Pass an attention_mask" if guessed else "Remove the masked positions from the prompt",
        )
    return first, last


def _row_positions(
    positions: Tensor | None, b: int, first: int, last: int, shape: tuple[int, ...]
) -> Tensor | None:
    """A row's share of position ids of any rank: (..., B, L), (..., 1, L) or (L,)."""
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dim() == 0:
        _refuse(
            "position_ids has the wrong type",
            "a tensor of integers",
            positions.dtype if isinstance(positions, Tensor) else type(positions).__name__,
            "Pass one position per prompt position",
        )
    if positions.shape[-1] != shape[1] or (
        positions.dim() > 1 and positions.shape[-2] not in (1, shape[0])
    ):
        _refuse(
            "position_ids has the wrong shape",
            f"(..., {shape[0]}, {shape[1]})",
            tuple(positions.shape),
            "Pass one position per prompt position",
        )
    row = positions
    if positions.dim() > 1:
        row = positions[..., b if positions.shape[-2] > 1 else 0, :]
    return row[..., first:last].detach().cpu()


def _refuse(what: str, wanted: object, got: object, do: str) -> None:
    raise RequestError(message(what, wanted=wanted, got=got, do=do))
