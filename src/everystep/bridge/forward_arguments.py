"""The arguments of one forward: feeds as a rectangle, padded on the left, after a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.bridge.findings import Findings
from everystep.bridge.foreign import NOBODY, Foreign
from everystep.bridge.sheets import Sheet
from everystep.errors import UnsupportedError
from everystep.types import Extra, Given, Work

_PLAIN = Extra()


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The feeds `feeds` of a work, in one rectangle of R rows and `length` columns.

    `empty`: (R,) how many columns stand before each. `extras`: (R,) what they bring and want.
    """

    work: Work
    feeds: Sequence[int]
    length: int
    empty: np.ndarray
    extras: Sequence[Extra]

    @classmethod
    def of(cls, work: Work, feeds: Sequence[int]) -> Block:
        """Make the rectangle that is as long as the longest of the feeds."""
        counts = work.counts[list(feeds)]
        length = int(counts.max())
        extras = [work.extras.get(feed, _PLAIN) for feed in feeds]
        return cls(work, feeds, length, length - counts, extras)

    def described(self) -> str:
        """Return what stands in it, for an error."""
        first = int(self.work.starts[list(self.feeds)].min())
        return f"{self.length} positions from {first} on, in {len(self.feeds)} rows"

    def tokens(self) -> np.ndarray:
        """Return (R, length) ids, 0 where there is none."""
        work, offsets = self.work, self.work.offsets
        if len(self.feeds) == len(work.rows) and not self.empty.any():
            return work.tokens.reshape(len(self.feeds), self.length).clip(min=0)
        table = np.zeros((len(self.feeds), self.length), dtype=np.int64)
        for row, feed in enumerate(self.feeds):
            begin = offsets[feed]
            table[row, self.empty[row] :] = work.tokens[begin : begin + work.counts[feed]]
        return table.clip(min=0)

    def positions(self) -> Tensor:
        """Return (R, length) position ids, or (axes, R, length); 0 where there is none."""
        extras = self.extras
        starts = self.work.starts[list(self.feeds)] - self.empty
        plain = torch.from_numpy((starts[:, None] + np.arange(self.length)).clip(min=0))
        axes = axes_of(extras[0])
        places = plain.expand(axes, *plain.shape).clone() if axes > 1 else plain
        for row, extra in enumerate(extras):
            if extra.positions is not None:
                given = extra.positions
                places[..., row, self.empty[row] :] = given if axes > 1 else given.reshape(-1)
        return places

    def embeds(self, foreign: Foreign, ids: Tensor) -> Tensor | None:
        """Return (R, length, E): what is read, where a feed brings embeddings."""
        given = [
            (row, int(self.empty[row]) + one.start, one.values)
            for row, extra in enumerate(self.extras)
            for one in extra.inputs
            if one.name == "embeds"
        ]
        if not given:
            return None
        hidden = foreign.embed(ids).clone()
        for row, start, values in given:
            hidden[row, start : start + len(values)] = values.to(hidden)
        return hidden

    def named(self) -> dict[str, Tensor]:
        """Return (R, length, ...): what is given per position by name, 0 where there is none.

        What a prompt is given as a whole is among it; such a prompt is alone.
        """
        found: dict[str, Tensor] = {}
        for row, extra in enumerate(self.extras):
            for name, start, values in extra.inputs:
                if name == "embeds":
                    continue
                if name not in found:
                    shape = (len(self.feeds), self.length, *values.shape[1:])
                    found[name] = values.new_zeros(shape)
                first = int(self.empty[row]) + start
                found[name][row, first : first + len(values)] = values
            found.update(extra.whole)
        return found

    def mask(self, sheet: Sheet, dtype: torch.dtype) -> Tensor | None:
        """Return (R, heads, length, width) to add to attention scores, where feeds bring masks."""
        masks = [extra.mask for extra in self.extras]
        if masks[0] is None:
            return None
        width = self.length + sheet.width
        heads = max(len(one) for one in masks if one is not None)
        seen = torch.zeros(len(masks), heads, self.length, width, dtype=torch.bool)
        for row, own in enumerate(masks):
            if own is not None:
                seen[row, :, int(self.empty[row]) :, width - own.shape[2] :] = own
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)

    def names(self) -> list[str] | None:
        """Return (R,) the adapter of each row, where a feed asks for one."""
        asked = [extra.adapters for extra in self.extras]
        if not any(asked):
            return None
        for pairs in asked:
            if len(pairs) > 1 or any(weight != 1.0 for _, weight in pairs):
                raise UnsupportedError(
                    "rows of a PEFT model have one adapter at its full weight",
                    wanted="one (name, 1.0) pair",
                    got=pairs,
                    do="Join adapters with PEFT's add_weighted_adapter",
                )
        return [pairs[0][0] if pairs else NOBODY for pairs in asked]


def kind_of(extra: Extra | None) -> tuple[object, ...] | None:
    """Return what feeds of one forward have in common; None for plain ones."""
    if extra is None:
        return None
    embeds = any(one.name == "embeds" for one in extra.inputs)
    named = frozenset(
        (one.name, one.values.shape[1:], one.values.dtype)
        for one in extra.inputs
        if one.name != "embeds"
    )
    wants = (extra.hidden or extra.layers or bool(extra.early), extra.attentions)
    brings = (axes_of(extra), embeds, named, extra.mask is not None, bool(extra.adapters))
    return (*brings, *wants)


def step_of(work: Work, feeds: Sequence[int], step: int) -> Work:
    """Return the work of the position `step` of feeds that are equally long."""
    index = list(feeds)
    last = int(work.counts[index[0]]) - step
    tokens = work.tokens[work.offsets[index] + step]
    extras = {
        place: _step_of_extra(work.extras[feed], step, int(work.starts[feed]) + step + 1)
        for place, feed in enumerate(index)
        if feed in work.extras
    }
    ones = np.ones(len(index), dtype=np.int64)
    wanted = (work.logits[index] >= last).astype(np.int64)
    return Work((), work.rows[index], work.starts[index] + step, ones, wanted, tokens, extras)


def _step_of_extra(extra: Extra, step: int, width: int) -> Extra:
    inputs = tuple(
        Given(one.name, 0, one.values[step - one.start : step - one.start + 1])
        for one in extra.inputs
        if one.start <= step < one.start + len(one.values)
    )
    positions = None if extra.positions is None else extra.positions[..., step : step + 1]
    mask = None if extra.mask is None else extra.mask[:, step : step + 1, :width]
    return replace(extra, inputs=inputs, positions=positions, mask=mask)


def axes_of(extra: Extra) -> int:
    """Return how many axes the position ids of a feed have; 1 where it brings none."""
    given = extra.positions
    return 1 if given is None or given.dim() == 1 else len(given)


def arguments(block: Block, sheet: Sheet, foreign: Foreign, findings: Findings) -> dict[str, Any]:
    """Return what the module is called with to extend the sheet by the block."""
    device, names = foreign.device, foreign.names
    ids = torch.from_numpy(block.tokens()).to(device)
    seen = sheet.shown(sheet.width + block.length)
    given: dict[str, Any] = {}
    if sheet.cache is not None:
        given[foreign.cache_name] = sheet.cache
    if sheet.encoded is not None:
        states, real = sheet.encoded
        given |= {"decoder_input_ids": ids, "encoder_outputs": (states,)}
        if foreign.source is None:
            given["attention_mask"] = real
        if "decoder_attention_mask" in names and sheet.leads.any():
            given["decoder_attention_mask"] = seen
    else:
        embeds = block.embeds(foreign, ids)
        given |= {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        if foreign.positions:
            given[foreign.positions] = block.positions().to(device)
        given |= {name: values.to(device) for name, values in block.named().items()}
        if (mask := block.mask(sheet, foreign.dtype)) is not None:
            given["attention_mask"] = mask.to(device)
        elif "attention_mask" in names and not (findings.bare and sheet.bare):
            given["attention_mask"] = seen
            if findings.linear:
                given["attention_mask"] = seen[:, sheet.width :] if block.empty.any() else None
    if (adapters := block.names()) is not None:
        given["adapter_names"] = adapters
    first = block.extras[0]
    if first.hidden or first.layers or first.early:
        given["output_hidden_states"] = True
    if first.attentions:
        given["output_attentions"] = True
    if "logits_to_keep" in names:
        given["logits_to_keep"] = max(1, int(block.work.logits[list(block.feeds)].max()))
    return given
