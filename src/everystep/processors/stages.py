"""Scores as each stage of a step left them, noted while the stages run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from everystep.devices import on_device
from everystep.processors.base import LogitsProcessor
from everystep.types import Rows, Scores, Sequence


class NotedStage(NamedTuple):
    """The scores that a stage left of some rows, the place of a row, and a readout's name."""

    name: str | None
    scores: Scores
    row: int


class Stages:
    """The scores of rows whose watchers are told of stages, one after another.

    What is noted is a copy of what a stage left, so noting runs nothing twice and changes no bit.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], list[NotedStage]] = {}

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
        watchers = [one.request.watcher for one in rows.sequences]
        at = [r for r, one in enumerate(watchers) if one is not None and one.stages]
        if not at:
            return
        chosen, left = rows, scores
        if len(at) < len(rows.sequences) or scores.tokens is None:  # whole rows may be changed
            chosen = rows.select(np.array(at))
            left = scores.select(on_device(scores.values.device, np.array(at)))
        if waiting is not None:
            left = Scores.of(waiting.process(chosen, left.values))
        owners = zip(chosen.sequences, chosen.lengths.tolist(), strict=True)
        for r, (one, length) in enumerate(owners):
            self._found.setdefault((id(one), length), []).append(NotedStage(name, left, r))

    def begin(self, rows: Rows) -> None:
        """Forget what was noted of the rows, whose stages run once more."""
        for one, length in zip(rows.sequences, rows.lengths, strict=True):
            self._found.pop((id(one), int(length)), None)

    def of(self, sequence: Sequence, length: int) -> list[NotedStage]:
        """Return the stages of a row with so many visible ids."""
        return self._found.get((id(sequence), length), [])
