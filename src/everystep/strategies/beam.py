"""Beam search and beam sampling: the best or the drawn continuations over all beams of a request.

Scores accumulate in float32 and every ranking is a `topk` over the same layout as the reference's,
so that ties fall alike. Source: the reference's vectorised `_beam_search`; one difference: there
the batch ends together, here each request ends when its own result can no longer change.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from everystep.draws import Places
from everystep.strategies.base import MAX_SEED, Batch, Drafts
from everystep.types import Children, Finished, FinishReason, Group, Sequence, TokenTable

_NEVER = -1.0e9


@dataclass(slots=True)
class Bank:
    """The best finished scores of a request, (W,) float32 each, and whether more can come."""

    scores: Tensor
    filled: Tensor
    open: bool = True

    def full(self) -> bool:
        """Whether every slot holds a finished hypothesis."""
        return bool(self.filled.all())


@dataclass(frozen=True)
class Beam:
    """`width` hypotheses go on; the `returns` best finished ones are the result.

    `eos_count`: how many end tokens the request has; (1 + eos_count) * width, at least 2 * width,
    candidates are ranked so that `width` can go on. `max_new`: the most tokens a hypothesis can
    have (for `early_stopping="never"`). `sampled`: candidates are drawn without replacement.
    """

    width: int
    returns: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos_count: int = 1
    max_new: int = 2**31
    sampled: bool = False
    streams: ClassVar[bool] = False
    scores: ClassVar[Literal["logits", "log_probs"]] = "log_probs"
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def kind(self) -> Hashable:
        return ("beam", self.width, self.eos_count, self.sampled)

    @property
    def ranked(self) -> int:
        """How many candidates of a request are looked at."""
        return max(2, 1 + self.eos_count) * self.width

    def opening_score(self, index: int) -> float:
        """Only the first of equal siblings counts at first."""
        return 0.0 if index == 0 else _NEVER

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return None

    def pick(self, batch: Batch, scores: Tensor) -> tuple[Tensor, ...]:
        """(G, ranked) accumulated scores and flat indices width * V."""
        running = torch.tensor([s.score for s in batch.sequences], dtype=scores.dtype)
        total = scores + running.to(scores.device)[:, None]
        total = total.reshape(len(batch.groups), -1)  # (G, W * V)
        if not self.sampled:
            return tuple(torch.topk(total, self.ranked))
        places = _group_places(batch, self.width)
        drawn = batch.draws.choose_without_replacement(
            torch.softmax(total, dim=-1), places, self.ranked
        )
        return total.gather(1, drawn), drawn

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """Candidates that end are banked, the best others go on."""
        scores, flat = torch.from_numpy(picked[0]), picked[1]
        vocabulary = batch.vocabulary
        parent = flat // vocabulary + np.arange(len(batch.groups))[:, None] * self.width
        token = flat % vocabulary
        _, reasons = batch.stops(parent.ravel(), token.reshape(-1, 1), np.ones(flat.size, int))
        hits = torch.tensor([reason is not None for reason in reasons]).reshape(scores.shape)
        going = scores + hits.float() * _NEVER
        next_scores, next_ranks = torch.topk(going, self.width)
        chosen = _Chosen([], [], [], [], [])
        settled = []
        for g, group in enumerate(batch.groups):
            ended, reasons_g = hits[g], reasons[g * self.ranked : (g + 1) * self.ranked]
            taken, final = self._bank(group, batch.sequences[g * self.width], scores[g], ended)
            for rank in taken:
                chosen.add(parent[g, rank], token[g, rank], final[rank], reasons_g[rank], 0)
            if self._settled(group, batch.sequences[g * self.width], next_scores[g], ended):
                settled.append(g)
            if g not in settled or group.request.linger:
                for index, rank in enumerate(next_ranks[g].tolist()):
                    chosen.add(parent[g, rank], token[g, rank], next_scores[g, index], None, index)
        return chosen.children(batch, self.width, tuple(settled))

    def _bank(
        self, group: Group, beam: Sequence, scores: Tensor, ended: Tensor
    ) -> tuple[list[int], Tensor]:
        """Ranks of the candidates that enter the bank, and the final score of every candidate."""
        own: Beam = group.request.strategy
        bank = group.memo.setdefault("bank", _empty_bank(self.width))
        final = scores / ((beam.generated + 1) ** own.length_penalty)
        closed = group.settled or not bank.open or (own.early_stopping is True and bank.full())
        first = torch.arange(self.ranked) < self.width
        just = ended & first & torch.tensor(not closed)
        merged = torch.cat([bank.scores, final + (~just) * _NEVER])
        filled = torch.cat([bank.filled, just])
        best = torch.topk(merged, self.width).indices
        bank.scores, bank.filled = merged[best], filled[best]
        taken = [int(i) - self.width for i in best.tolist() if i >= self.width]
        return [rank for rank in sorted(taken) if just[rank]], final

    def _settled(self, group: Group, beam: Sequence, going: Tensor, ended: Tensor) -> bool:
        """Whether no later hypothesis can change the result.

        Source: the reference's `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        own: Beam = group.request.strategy
        bank: Bank = group.memo["bank"]
        length = beam.generated + 1
        if own.early_stopping == "never" and own.length_penalty > 0.0:
            length = own.max_new
        best = going[0] / (length**own.length_penalty)
        worst = torch.where(bank.filled, bank.scores.min(), _NEVER)
        bank.open = bank.open and bool((best > worst).any())
        full = own.early_stopping is True and bank.full()
        return not bank.open or full or bool(ended.all())

    def keep(self, group: Group) -> list[Finished]:
        """The `width` best, as many as the bank has slots."""
        return sorted(group.done, key=lambda done: -done.score)[: self.width]

    def finish(self, group: Group) -> list[Finished]:
        """The `returns` best; an empty hypothesis where fewer have ended."""
        best = self.keep(group)[: self.returns]
        reason = FinishReason("length")
        empty = Finished(np.empty(0, np.int64), _NEVER, reason, 0, 0, {})
        return best + [empty] * (self.returns - len(best))


def _empty_bank(width: int) -> Bank:
    return Bank(torch.full((width,), _NEVER), torch.zeros(width, dtype=torch.bool))


def _group_places(batch: Batch, width: int) -> Places:
    """Where the draws of whole groups stand: at their first beam, in the place of the group."""
    firsts = [batch.sequences[g * width] for g in range(len(batch.groups))]
    seed = np.array([s.request.draws.seed & MAX_SEED for s in firsts], dtype=np.uint64)
    position = np.array([s.generated for s in firsts], dtype=np.uint64)
    slot = batch.slot[::width] // width
    return Places(seed, np.zeros(len(firsts), np.uint64), position, slot, batch.slots // width)


@dataclass
class _Chosen:
    """Children, gathered one by one; there are at most a few per beam."""

    parent: list[int]
    token: list[int]
    score: list[float]
    finish: list[FinishReason | None]
    index: list[int]

    def add(
        self, parent: int, token: int, score: Tensor, finish: FinishReason | None, index: int
    ) -> None:
        self.parent.append(int(parent))
        self.token.append(int(token))
        self.score.append(float(score))
        self.finish.append(finish)
        self.index.append(index)

    def children(self, batch: Batch, width: int, settled: tuple[int, ...]) -> Children:
        """Each child remembers its beams as a chain (earlier chain, beam index in the call)."""
        memo: list[dict[str, object] | None] = []
        for parent in self.parent:
            source = batch.sequences[parent]
            rank = batch.groups[parent // width].rank * width + parent % width
            memo.append({"beams": (source.memo.get("beams"), rank)})
        return Children(
            np.array(self.parent, dtype=np.int64),
            np.array(self.token, dtype=np.int64).reshape(-1, 1),
            np.ones(len(self.parent), dtype=np.int64),
            np.array(self.score, dtype=np.float64),
            self.finish,
            memo=memo,
            index=np.array(self.index, dtype=np.int64),
            settled=settled,
        )
