"""The collector: step records of a lockstep call, as the rectangle that callers expect.

It only observes; the engine does not depend on it. A slot is a row of the call's rectangle:
rank * width + the row of the request that the sequence has at that step. Where a strategy
feeds more sequences than it keeps rows of, only those are kept that a token was chosen from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from everystep.engine.batches import Scored
from everystep.engine.watching import StepRecord
from everystep.nn.modes import ordinary_mode
from everystep.types import Answer, Children
from everystep.types.request import Strategy


class Captures:
    """Keeps what the positions before each token showed, of sequences that come and go.

    A request is known by its name, and its sequences by their rows, as callers get them.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, list[Answer]]] = {}

    def __call__(self, record: StepRecord) -> None:
        """Rows of drafts that were not accepted are left out, and what is fed again."""
        scored, layout = record.scored, record.scored.layout
        if not record.captures:
            return
        accepted, rows = _accepted(scored, record.children), _kept_rows(scored, record.children)
        for s, (start, answer) in record.captures.items():
            if rows[s] < 0:
                continue
            name = scored.groups[layout.group_of[s]].request.request_id
            kept = self._kept.setdefault(name, {}).setdefault(int(rows[s]), [])
            read = 1 + len(layout.drafts[s])
            shown = _per_token(start == 0, answer, read, accepted[s], begun=bool(kept))
            kept += [one for _, one in shown]

    def taken(self, name: str) -> dict[int, list[Answer]]:
        """Return what is kept of a request, by row an answer for each token, and forget it."""
        return self._kept.pop(name, {})


@dataclass(slots=True)
class Collector:
    """Keeps, per slot and in order, what each generated token was chosen from.

    `slots`: rows of the rectangle; `width`: rows per request; `windows`: per layer, how far
    back it looks, None for all the way. `kept_captures`: what a token's positions showed, and
    whether they are all since the first.
    """

    slots: int
    width: int
    scores: bool = False
    logits: bool = False
    captures: bool = False
    windows: Sequence[int | None] = ()
    kept_scores: list[list[Tensor]] = field(default_factory=list)
    kept_logits: list[list[Tensor]] = field(default_factory=list)
    kept_captures: list[list[tuple[bool, Answer]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kept in (self.kept_scores, self.kept_logits, self.kept_captures):
            kept.extend([] for _ in range(self.slots))

    @property
    def keeps(self) -> bool:
        """True if there is anything to record."""
        return self.scores or self.logits or self.captures

    def __call__(self, record: StepRecord) -> None:
        """Rows of drafts that were not accepted are left out."""
        scored, children = record.scored, record.children
        layout, first = scored.layout, scored.layout.first
        scores = scored.scores.whole().values if self.scores else None
        accepted = _accepted(scored, children)
        kept = _kept_rows(scored, children)
        for s in np.flatnonzero(kept >= 0).tolist():
            slot = scored.groups[layout.group_of[s]].rank * self.width + int(kept[s])
            rows = range(first[s], first[s] + accepted[s])
            if scores is not None:
                self.kept_scores[slot] += [scores[row].clone() for row in rows]
            if self.logits:
                self.kept_logits[slot] += [scored.logits[row].clone() for row in rows]
            if self.captures and s in record.captures:
                start, answer = record.captures[s]
                read = 1 + len(layout.drafts[s])
                self.kept_captures[slot] += _per_token(start == 0, answer, read, accepted[s])

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
        return tuple(
            tuple(map(_in_window, layers, self.windows or (None,) * len(layers)))
            for layers in steps
        )

    def cross_steps(self, starts: np.ndarray, width: int) -> tuple[tuple[Tensor, ...], ...]:
        """Per step, per layer: (slots, H, T, S) attention over the encoder states of each slot,
        which begin at `starts` of `width` positions."""

        def place(attention: Tensor, start: int, whole: bool) -> Tensor:
            return torch.nn.functional.pad(attention, (start, width - start - attention.shape[-1]))

        return self._capture_steps(lambda answer: answer.cross_attentions, place, starts)

    def _capture_steps(
        self,
        part: Callable[[Answer], tuple[Tensor, ...] | None],
        pad: Callable[[Tensor, int, bool], Tensor],
        pads: np.ndarray,
    ) -> tuple[tuple[Tensor, ...], ...]:
        steps = []
        for taken in zip_longest(*self.kept_captures):
            padded = [
                capture and [pad(one, int(n), capture[0]) for one in part(capture[1]) or ()]
                for capture, n in zip(taken, pads, strict=True)
            ]
            # A slot that needed fewer steps than others is 0 from there on.
            model = next(row for row in padded if row is not None)
            nothing = [torch.zeros_like(one) for one in model]
            rows = [nothing if row is None else row for row in padded]
            steps.append(tuple(map(torch.stack, zip(*rows, strict=True))))
        return tuple(steps)


def kept_rows(strategy: Strategy) -> int:
    """Rows per request in what callers get of a step: those of all its sequences, or, where they
    are candidates of one that streams, of those alone that a token was chosen from."""
    return strategy.returns if strategy.streams else strategy.width


def _accepted(scored: Scored, children: Children) -> np.ndarray:
    """(S,) how many rows of each sequence led to tokens: one, or more where drafts stood."""
    accepted = np.ones(len(scored.layout.sequences), dtype=np.int64)
    np.maximum.at(accepted, children.parent, children.counts)
    return accepted


def _kept_rows(scored: Scored, children: Children) -> np.ndarray:
    """(S,) which of its request's rows each sequence is kept in, -1 for none."""
    strategy, layout = scored.groups[0].request.strategy, scored.layout
    if kept_rows(strategy) == strategy.width:
        return np.array([sequence.index for sequence in layout.sequences], dtype=np.int64)
    chosen_from = np.unique(children.parent[children.counts > 0])
    group = np.array(layout.group_of)[chosen_from]
    kept = np.full(len(layout.sequences), -1, dtype=np.int64)
    kept[chosen_from] = np.arange(len(group)) - np.searchsorted(group, group)
    return kept


def _steps(kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """A slot that needed fewer steps than others is filled up with -inf."""
    longest = max(len(rows) for rows in kept)
    for rows in kept:
        rows += [torch.full_like(rows[0], -torch.inf)] * (longest - len(rows))
    return tuple(torch.stack(rows) for rows in zip(*kept, strict=True))


def _pad_layers(layer: Tensor, pad: int, whole: bool) -> Tensor:
    return torch.nn.functional.pad(layer, (0, 0, pad if whole else 0, 0))


def _in_window(attention: Tensor, window: int | None) -> Tensor:
    """Without the keys that a cache of `window` positions would have dropped."""
    queries, keys = attention.shape[-2:]
    if window is None or queries == keys:
        return attention
    return attention[..., -(window - 1 + queries) :]


def _per_token(
    whole: bool, answer: Answer, rows: int, accepted: int, *, begun: bool = False
) -> Iterator[tuple[bool, Answer]]:
    """The answer for each accepted row: `rows` of the positions, the last ones, were read out.

    `begun`: earlier tokens are known, so that further positions were fed again.
    """
    own = answer.layers or answer.attentions or ()
    count = own[0].shape[-2]
    for i in range(accepted):
        last = count - rows + 1 + i
        yield whole and i == 0, _cut(answer, last - 1 if i or begun else 0, last, count - last)


def _cut(answer: Answer, first: int, last: int, after: int) -> Answer:
    """Return what a feed of [first, last) of these positions, which `after` more follow, would have
    returned."""
    layers, own, across = answer.layers, answer.attentions, answer.cross_attentions
    return Answer(
        layers=layers and tuple(one[first:last] for one in layers),
        attentions=own and tuple(one[:, first:last, : one.shape[-1] - after] for one in own),
        cross_attentions=across and tuple(one[:, first:last] for one in across),
    )


def owned_layers(
    answers: Iterable[tuple[Tensor, ...] | None],
) -> tuple[tuple[Tensor, ...], ...]:
    """Return tensors that callers may change and learn from, as those of inference mode forbid."""
    with ordinary_mode(), torch.no_grad():
        return tuple(tuple(one.clone() for one in layers or ()) for layers in answers)
