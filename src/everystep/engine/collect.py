"""The collector: step records of a lockstep call, as the rectangle that callers expect.

It only observes; the engine does not depend on it. A slot is a row of the call's rectangle:
rank * width + the row of the request that the sequence has at that step. Where a strategy
feeds more sequences than it keeps rows of, only those are kept that a token was chosen from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from everystep.engine.records import Capture, StepRecord
from everystep.types import Answer
from everystep.types.protocols import Strategy


@dataclass(slots=True)
class Collector:
    """Keeps, per slot and in order, what each generated token was chosen from.

    `slots`: rows of the rectangle; `width`: rows per request; `windows`: per layer, how far
    back it looks, None for all the way.
    """

    slots: int
    width: int
    scores: bool = False
    logits: bool = False
    captures: bool = False
    windows: Sequence[int | None] = ()
    kept_scores: list[list[Tensor]] = field(default_factory=list)
    kept_logits: list[list[Tensor]] = field(default_factory=list)
    kept_captures: list[list[Capture]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kept in (self.kept_scores, self.kept_logits, self.kept_captures):
            kept.extend([] for _ in range(self.slots))

    @property
    def keeps(self) -> bool:
        """Whether there is anything to record."""
        return self.scores or self.logits or self.captures

    def __call__(self, record: StepRecord) -> None:
        """Rows of drafts that were not accepted are left out."""
        bounds = np.searchsorted(record.row_sequence, np.arange(len(record.sequences) + 1))
        accepted, kept = _accepted(record), _kept_rows(record)
        for s in np.flatnonzero(kept >= 0).tolist():
            slot = record.groups[record.group_of[s]].rank * self.width + int(kept[s])
            first, read = int(bounds[s]), int(bounds[s + 1] - bounds[s])
            rows = range(first, first + accepted[s])
            if self.scores:
                self.kept_scores[slot] += [record.scores[row].clone() for row in rows]
            if self.logits:
                self.kept_logits[slot] += [record.logits[row].clone() for row in rows]
            if self.captures and s in record.captures:
                self.kept_captures[slot] += record.captures[s].per_token(read, accepted[s])

    def score_steps(self) -> tuple[Tensor, ...]:
        """One (slots, V) tensor per step."""
        return _steps(self.kept_scores)

    def logit_steps(self) -> tuple[Tensor, ...]:
        """One (slots, V) tensor per step."""
        return _steps(self.kept_logits)

    def layer_steps(self, pads: np.ndarray) -> tuple[tuple[Tensor, ...], ...]:
        """Per step, per layer: (slots, T, E); whole rows are padded on the left by `pads`."""
        return self._capture_steps(lambda answer: answer.layers, _pad_layers, pads)

    def attention_steps(self, pads: np.ndarray, behind: int = 0) -> tuple[tuple[Tensor, ...], ...]:
        """Per step, per layer: (slots, H, T, S), empty key positions on the left as in `pads`, of
        which the first `behind` positions were never fed.

        Once the prompt is fed, layers that look at a window give the keys of that window alone.
        """

        def place(attention: Tensor, pad: int, whole: bool) -> Tensor:
            queries = pad - behind if whole else 0
            return torch.nn.functional.pad(attention, (pad, 0, queries, 0))

        steps = self._capture_steps(lambda answer: answer.attentions, place, pads)
        return tuple(tuple(map(_in_window, layers, self._windows(layers))) for layers in steps)

    def cross_steps(self, starts: np.ndarray, width: int) -> tuple[tuple[Tensor, ...], ...]:
        """Per step, per layer: (slots, H, T, S) attention over the encoder states of each slot,
        which begin at `starts` of `width` positions."""

        def place(attention: Tensor, start: int, whole: bool) -> Tensor:
            return torch.nn.functional.pad(attention, (start, width - start - attention.shape[-1]))

        return self._capture_steps(lambda answer: answer.cross_attentions, place, starts)

    def _windows(self, layers: Sequence[Tensor]) -> Sequence[int | None]:
        return self.windows or (None,) * len(layers)

    def _capture_steps(
        self,
        part: Callable[[Answer], tuple[Tensor, ...] | None],
        pad: Callable[[Tensor, int, bool], Tensor],
        pads: np.ndarray,
    ) -> tuple[tuple[Tensor, ...], ...]:
        steps = []
        for taken in zip_longest(*self.kept_captures):
            padded = [
                None
                if capture is None
                else [pad(one, int(n), capture.start == 0) for one in part(capture.answer) or ()]
                for capture, n in zip(taken, pads, strict=True)
            ]
            steps.append(tuple(map(torch.stack, zip(*_filled(padded), strict=True))))
        return tuple(steps)


def kept_rows(strategy: Strategy) -> int:
    """Rows per request in what callers get of a step: those of all its sequences, or, where they
    are candidates of one that streams, of those alone that a token was chosen from."""
    return strategy.returns if strategy.streams else strategy.width


def _kept_rows(record: StepRecord) -> np.ndarray:
    """(S,) which of its request's rows each sequence is kept in, -1 for none."""
    strategy = record.groups[0].request.strategy
    if kept_rows(strategy) == strategy.width:
        return np.array([sequence.index for sequence in record.sequences], dtype=np.int64)
    chosen_from = np.unique(record.children.parent[record.children.counts > 0])
    group = record.group_of[chosen_from]
    kept = np.full(len(record.sequences), -1, dtype=np.int64)
    kept[chosen_from] = np.arange(len(group)) - np.searchsorted(group, group)
    return kept


def _accepted(record: StepRecord) -> np.ndarray:
    """(S,) how many rows of each sequence led to a token: one, or more where drafts stood."""
    accepted = np.ones(len(record.sequences), dtype=np.int64)
    np.maximum.at(accepted, record.children.parent, record.children.counts)
    return accepted


def _steps(kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """A slot that needed fewer steps than others is filled up with -inf."""
    longest = max(len(rows) for rows in kept)
    for rows in kept:
        rows += [torch.full_like(rows[0], -torch.inf)] * (longest - len(rows))
    return tuple(torch.stack(rows) for rows in zip(*kept, strict=True))


def _filled(rows: list[list[Tensor] | None]) -> list[list[Tensor]]:
    """A slot that needed fewer steps than others is 0 from there on."""
    model = next(row for row in rows if row is not None)
    return [[torch.zeros_like(one) for one in model] if row is None else row for row in rows]


def _pad_layers(layer: Tensor, pad: int, whole: bool) -> Tensor:
    return torch.nn.functional.pad(layer, (0, 0, pad if whole else 0, 0))


def _in_window(attention: Tensor, window: int | None) -> Tensor:
    """Without the keys that a cache of `window` positions would have dropped."""
    queries, keys = attention.shape[-2:]
    if window is None or queries == keys:
        return attention
    return attention[..., -(window - 1 + queries) :]
