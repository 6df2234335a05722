"""Scores as each stage of a step left them, noted while the stages run."""

from __future__ import annotations

import torch
from torch import Tensor

from everystep.processors.base import LogitsProcessor
from everystep.types import Rows, Scores, Sequence


class Stages:
    """The scores of rows whose requests are watched, stage by stage.

    What is noted is a copy of what a stage left, so noting runs nothing twice and changes no bit.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], list[tuple[str | None, Tensor]]] = {}

    def note(
        self,
        rows: Rows,
        scores: Scores,
        name: str | None = None,
        waiting: LogitsProcessor | None = None,
    ) -> None:
        """Note what a stage left of the rows; the name of a processor's stage is its request's.

        `waiting`: a processor that has still to be applied to the scores.
        """
        at = [r for r, one in enumerate(rows.sequences) if one.request.watcher is not None]
        if not at:
            return
        chosen = rows.select(torch.tensor(at).numpy())
        left = scores.select(torch.tensor(at, device=scores.values.device)).whole().values
        if waiting is not None:
            left = waiting.process(chosen, left)
        for one, length, values in zip(chosen.sequences, chosen.lengths, left, strict=True):
            self._found.setdefault((id(one), int(length)), []).append((name, values))

    def begin(self, rows: Rows) -> None:
        """Forget what was noted of the rows, whose stages run once more."""
        for one, length in zip(rows.sequences, rows.lengths, strict=True):
            self._found.pop((id(one), int(length)), None)

    def of(self, sequence: Sequence, length: int) -> list[tuple[str | None, Tensor]]:
        """Return the names and scores (V,) of the stages of a row with so many visible ids."""
        return self._found.get((id(sequence), length), [])
