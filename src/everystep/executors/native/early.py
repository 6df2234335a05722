"""What earlier layers would say: room for it in a step, and the answers of feeds out of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everystep.executors.native.library import StepWork
from everystep.types import Work


class EarlyLayers:
    """The layers whose inputs some feeds want to have read out, and room for what is told of them.

    `logits`: (R, V), of each feed layer by layer the positions whose logits it wants.
    """

    def __init__(self, work: Work, width: int, vocabulary: int) -> None:
        asked = {f: extra.early for f, extra in work.extras.items() if extra.early}
        found = sorted({layer for layers in asked.values() for layer in layers})
        tokens, ends = len(work.tokens), work.counts.cumsum()
        self._layers = np.array(found, dtype=np.int64)
        self._shapes: dict[int, tuple[int, int]] = {}
        places = [np.empty(0, dtype=np.int64)]
        for f, layers in asked.items():
            own = np.arange(ends[f] - work.logits[f], ends[f])
            places += [found.index(layer) * tokens + own for layer in layers]
            self._shapes[f] = (len(layers), len(own))
        self._places = np.concatenate(places)
        self._hidden = torch.empty(len(found), tokens, width)
        self.logits = torch.empty(len(self._places), vocabulary)

    def write(self, step: StepWork) -> None:
        """Asks the step for them; it must be kept until the step is done."""
        step.early, step.early_rows = len(self._layers), len(self._places)
        held = (self._layers.ctypes.data, self._hidden.data_ptr(), self._places.ctypes.data)
        step.early_layers, step.early_hidden, step.early_places = held
        step.early_logits = self.logits.data_ptr()

    def answers(self) -> dict[int, Tensor]:
        """By feed (layers, positions, V)."""
        parts = self.logits.split([n * m for n, m in self._shapes.values()])  # type: ignore[no-untyped-call]
        pairs = zip(self._shapes.items(), parts, strict=True)
        return {f: part.view(*shape, -1) for (f, shape), part in pairs}
