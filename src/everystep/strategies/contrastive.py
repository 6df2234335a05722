"""Contrastive search: a likely token whose hidden state differs from all earlier ones.

A request has `top_k` siblings that share all tokens but the last, provisional one. Each step feeds
them all, keeps the best and makes its most likely next tokens the new siblings.
Source: Su et al. 2022, "A Contrastive Framework for Neural Text Generation".
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.strategies.base import Batch, Drafts, Reads
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence, TokenTable


@dataclass(frozen=True)
class Contrastive:
    """argmax over the siblings of (1 - alpha) * probability - alpha * highest cosine similarity."""

    top_k: int
    alpha: float
    returns: ClassVar[int] = 1
    kept_rows: ClassVar[int] = 1
    streams: ClassVar[bool] = True
    reads: ClassVar[Reads] = Reads()
    needs: ClassVar[frozenset[str]] = frozenset({"columns"})

    @property
    def width(self) -> int:
        return self.top_k

    @property
    def kind(self) -> Hashable:
        return ("contrastive", self.top_k)

    def opening_score(self, index: int) -> float:
        return 0.0

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return None

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        """(S,) rating of each sibling; (S, top_k) probabilities and ids of its next tokens."""
        values = scores.whole().values
        probabilities, tokens = torch.topk(torch.softmax(values, dim=-1), self.top_k)
        ratings = [self._rating(batch, s).to(values.device) for s in range(len(batch))]
        return torch.stack(ratings), probabilities, tokens

    def _rating(self, batch: Batch, s: int) -> Tensor:
        sequence = batch.sequences[s]
        if not sequence.provisional:  # the opening: there is nothing to choose between yet
            return torch.zeros((), dtype=torch.float64)
        hidden = batch.columns(s).double()
        hidden = hidden / hidden.norm(dim=-1, keepdim=True)
        similarity = (hidden[:-1] @ hidden[-1]).max()
        alpha = sequence.request.strategy.alpha
        return (1.0 - alpha) * sequence.score - alpha * similarity

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        ratings, probabilities, tokens = picked
        best = [
            first + int(ratings[first : first + self.top_k].argmax())
            for first in range(0, len(batch), self.top_k)
        ]
        reasons = self._reasons(batch, np.array(best))
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
        """Why the chosen siblings end with their last token, which is settled now."""
        waiting = [batch.sequences[s].provisional > 0 for s in best]
        last = np.array(
            [
                batch.table.data[q.line, q.visible - 1] if q.provisional else 0
                for q in (batch.sequences[s] for s in best)
            ]
        )
        _, reasons = batch.stops(best, last.reshape(-1, 1), np.ones(len(best), int))
        return [r if w else None for r, w in zip(reasons, waiting, strict=True)]

    def keep(self, group: Group) -> list[Finished]:
        return group.done

    def finish(self, group: Group) -> list[Finished]:
        return group.done[:1]  # siblings that are cut short all hold the same settled tokens
