"""What feeds want beyond logits, out of what a module returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from everystep.bridge.forward_arguments import Block
from everystep.bridge.sheets import Sheet
from everystep.types import Answer


def answer_of(output: Any, block: Block, row: int, sheet: Sheet) -> Answer:
    """Return what the feed in this row of the block wanted, from the forward of the sheet."""
    extra, before = block.extras[row], "decoder_" if sheet.encoded is not None else ""
    own = slice(int(block.empty[row]), None)
    layers = attentions = across = hidden = None
    if extra.hidden or extra.layers:
        found = _shown(output, before + "hidden_states")
        layers = tuple(layer[row, own] for layer in found) if extra.layers else None
        hidden = found[-1][row, own] if extra.hidden else None
    if extra.attentions:
        weights = [layer[row, :, own] for layer in _shown(output, before + "attentions")]
        # A window shows the last columns alone.
        whole = [F.pad(one, (sheet.width - one.shape[-1], 0)) for one in weights]
        attentions = tuple(one[..., int(sheet.leads[row]) :] for one in whole)
        if sheet.encoded is not None:
            read = int(sheet.encoded[1][row].sum())
            crossed = _shown(output, "cross_attentions")
            across = tuple(layer[row, :, own, :read] for layer in crossed)
    return Answer(hidden, layers, attentions, across)


def early_of(
    output: Any, layers: Sequence[int], row: int, count: int, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return (layers, count, V): what the head makes of a row's end before some layers."""
    found = _shown(output, "hidden_states")
    states = torch.stack([found[layer][row, found[layer].shape[1] - count :] for layer in layers])
    return head(states)


def _shown(output: Any, name: str) -> Sequence[Tensor]:
    found: Sequence[Tensor] = getattr(output, name)
    return found
