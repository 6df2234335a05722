"""Contrastive search: a likely token whose hidden state differs from all earlier ones.

A request has `top_k` siblings that share all tokens but the last, provisional one. Each step feeds
them all, keeps the best and makes its most likely next tokens the new siblings.
Source: Su et al. 2022, "A Contrastive Framework for Neural Text Generation".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.strategies.single import Picked
from everystep.types import Children, Finished, FinishReason, Group, Scores


@strategy("contrastive")
@dataclass(frozen=True)
class Contrastive:
    """argmax over the siblings of (1 - alpha) * probability - alpha * highest cosine similarity."""

    top_k: int
    alpha: float
    returns: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads(hidden=True)
    rounds: ClassVar[int] = 1

    @property
    def width(self) -> int:
        return self.top_k

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Pick (S,) rating of each sibling; (S, top_k) probabilities and ids of its next tokens."""
        values = scores.whole().values
        probabilities, tokens = torch.topk(torch.softmax(values, dim=-1), self.top_k)
        units: dict[tuple[int, int], Tensor] = {}
        ratings = [
            on_device(values.device, self._rating(batch, s, units)) for s in range(len(batch))
        ]
        return torch.stack(ratings), probabilities, tokens

    def _rating(self, batch: Batch, s: int, units: dict[tuple[int, int], Tensor]) -> Tensor:
        """Return the () rating of sibling s; `units` keeps directions that siblings share."""
        sequence = batch.sequences[s]
        if not sequence.provisional:  # the opening: there is nothing to choose between yet
            return torch.zeros((), dtype=torch.float64)
        if sequence.score == 0.0:  # ruled out: it is here because nothing else was left
            return torch.tensor(-torch.inf, dtype=torch.float64)
        pieces = [_directions(piece, units) for piece in batch.columns(s).pieces]
        last = pieces[-1][-1]
        earlier = (piece for piece in (*pieces[:-1], pieces[-1][:-1]) if len(piece))
        similarity = torch.stack([(piece @ last).max() for piece in earlier]).max()
        return (1.0 - self.alpha) * sequence.score - self.alpha * similarity

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Settle the token of the best sibling of each group, and give it `top_k` children."""
        ratings, probabilities, tokens = picked[0]
        best = [
            first + int(ratings[first : first + self.top_k].argmax())
            for first in range(0, len(batch), self.top_k)
        ]
        reasons = self._reasons(batch, np.array(best))
        lost = np.isnan(ratings[best]) | np.isnan(probabilities[best]).any(axis=1)
        reasons = [undrawable() if gone else r for gone, r in zip(lost, reasons, strict=True)]
        parent: list[int] = []
        finish: list[FinishReason | None] = []
        for s, reason in zip(best, reasons, strict=True):
            copies = self.top_k if reason is None else 1
            parent += [s] * copies
            finish += [reason] * copies
        alive = np.array([reason is None for reason in finish], dtype=np.int64)
        index = np.concatenate([np.arange(self.top_k if r is None else 1) for r in reasons])
        parents = np.array(parent)
        return Children(
            parents,
            tokens[parents, index].reshape(-1, 1),
            alive,
            probabilities[parents, index].astype(np.float64),
            finish,
            provisional=alive,
            index=index,
        )

    def _reasons(self, batch: Batch, best: np.ndarray) -> list[FinishReason | None]:
        """Return why the chosen siblings end with their last token, which is settled now."""
        chosen = [batch.sequences[s] for s in best]
        last = [batch.table.data[q.line, q.visible - 1] if q.provisional else 0 for q in chosen]
        reasons = batch.stops(best, np.array(last))
        return [r if q.provisional else None for r, q in zip(reasons, chosen, strict=True)]

    def finish(self, group: Group) -> list[Finished]:
        """Return the settled tokens, which all siblings share."""
        return group.done[:1]


def _directions(hidden: Tensor, known: dict[tuple[int, int], Tensor]) -> Tensor:
    """Return (n, E) hidden states as float64 of length 1, worked out once for the same memory."""
    place = (hidden.data_ptr(), len(hidden))
    if place not in known:
        wide = hidden.double()
        known[place] = wide / wide.norm(dim=-1, keepdim=True)
    return known[place]
