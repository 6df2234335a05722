"""What feeds want of layers: room for it in a step, and the answers that are made of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from everystep.executors.native.across import StatesOfRows
from everystep.executors.native.library import StackWeights, StepWork
from everystep.types import Answer, Extra, Work


class WantedLayers:
    """Room for what some feeds want of layers beside their logits.

    It holds the last hidden states, the inputs of layers, those of them that the head reads out,
    and the weights of attention, over the row and over the encoder states that rows look at.
    """

    def __init__(self, work: Work, shape: StackWeights, across: StatesOfRows | None) -> None:
        self._extras = {f: extra for f, extra in work.extras.items() if self.wanted_by(extra)}
        self._counts = work.counts.tolist()
        tokens, asking = int(work.counts.sum()), self._extras.values()
        last = any(extra.hidden or extra.layers for extra in asking)
        self._last = torch.empty(tokens, shape.width) if last else None
        whole = range(shape.layers) if any(extra.layers for extra in asking) else ()
        found = sorted({*whole, *(layer for extra in asking for layer in extra.early)})
        self._layers = np.array(found, dtype=np.int64)
        self._hidden = torch.empty(len(found), tokens, shape.width)
        self._places, self._read = self._read_out(work, found, tokens)
        self._logits = torch.empty(len(self._places), shape.vocabulary)
        self._weights = {
            f: torch.empty(shape.layers, shape.heads, count, int(work.starts[f]) + count)
            for f, extra in self._extras.items()
            if extra.attentions
            for count in (self._counts[f],)
        }
        self._across = {}
        if across is not None and self._weights:
            _, seen = across.seen_by(work.rows.tolist())
            for f, own in self._weights.items():
                self._across[f] = torch.empty(*own.shape[:3], int(seen[f]))
        self._pointers = self._addresses(self._weights)
        self._across_pointers = self._addresses(self._across)

    @staticmethod
    def wanted_by(extra: Extra) -> bool:
        """Return whether a feed wants any of that."""
        return extra.hidden or extra.layers or extra.attentions or bool(extra.early)

    def _addresses(self, held: dict[int, torch.Tensor]) -> np.ndarray:
        """Return (F,) addresses, 0 where there is nothing."""
        pointers = np.zeros(len(self._counts), dtype=np.int64)
        for f, weights in held.items():
            pointers[f] = weights.data_ptr()
        return pointers

    def _read_out(
        self, work: Work, found: list[int], tokens: int
    ) -> tuple[np.ndarray, dict[int, tuple[int, int]]]:
        """Return which hidden states the head reads, and how many layers and positions of each
        feed.

        They come feed by feed and layer by layer: the positions whose logits are wanted.
        """
        ends, places = work.counts.cumsum(), [np.empty(0, dtype=np.int64)]
        shapes = {}
        for f, extra in self._extras.items():
            own = np.arange(ends[f] - work.logits[f], ends[f])
            places += [found.index(layer) * tokens + own for layer in extra.early]
            shapes[f] = (len(extra.early), len(own))
        return np.concatenate(places), {f: one for f, one in shapes.items() if one[0]}

    def write(self, step: StepWork) -> None:
        """Ask the step for them; it must be kept until the step is done."""
        step.hidden = None if self._last is None else self._last.data_ptr()
        step.early, step.early_rows = len(self._layers), len(self._places)
        held = (self._layers.ctypes.data, self._hidden.data_ptr(), self._places.ctypes.data)
        step.early_layers, step.early_hidden, step.early_places = held
        step.early_logits = self._logits.data_ptr()
        step.attentions = self._pointers.ctypes.data if self._weights else None
        step.across_attentions = self._across_pointers.ctypes.data if self._across else None

    def answers(self) -> dict[int, Answer]:
        """Return the answers by feed."""
        found = {f: Answer() for f in self._extras}
        last = [] if self._last is None else self._last.split(self._counts)  # type: ignore[no-untyped-call]
        inputs = self._hidden.split(self._counts, dim=1)  # type: ignore[no-untyped-call]
        for f, extra in self._extras.items():
            if extra.hidden:
                found[f] = replace(found[f], hidden=last[f])
            if extra.layers:
                # As in transformers, the last entry is the normalised one.
                found[f] = replace(found[f], layers=(*inputs[f], last[f]))
            if extra.attentions:
                across = tuple(self._across[f]) if f in self._across else None
                weights = tuple(self._weights[f])
                found[f] = replace(found[f], attentions=weights, cross_attentions=across)
        parts = self._logits.split([n * m for n, m in self._read.values()])  # type: ignore[no-untyped-call]
        for (f, shape), part in zip(self._read.items(), parts, strict=True):
            found[f] = replace(found[f], early=part.view(*shape, part.shape[1]))
        return found
