"""Beam search and beam sampling: the best or the drawn continuations over all beams of a request.

Scores accumulate in float32 and every ranking is a `topk` over the same layout as the reference's,
so that ties fall alike. Source: the reference's vectorised `_beam_search`; one difference: there
the batch ends together, here each request ends when its own result can no longer change.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.draws import Places
from everystep.strategies.base import MAX_SEED, Batch, Drafts, Reads, require_drawn
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence, TokenTable

_NEVER = -1.0e9
_NOTHING = Finished(np.empty(0, np.int64), _NEVER, FinishReason("length"), 0, 0, {})


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
    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def kept_rows(self) -> int:
        return self.width

    @property
    def kind(self) -> Hashable:
        return ("beam", self.width, self.eos_count, self.sampled)

    @property
    def ranked(self) -> int:
        """How many candidates of a request are looked at."""
        return max(2, 1 + self.eos_count) * self.width

    @property
    def reads(self) -> Reads:
        """All ranked candidates may come from one beam; draws look at every token."""
        return Reads("log_probs", best=0 if self.sampled else self.ranked)

    def horizon(self, length: int) -> int:
        """The length at which a running beam of `length` tokens is judged."""
        late = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_new if late else length

    def opening_score(self, index: int) -> float:
        """Only the first of equal siblings counts at first."""
        return 0.0 if index == 0 else _NEVER

    def propose(self, sequences: list[Sequence], table: TokenTable) -> Drafts | None:
        return None

    def pick(self, batch: Batch, scores: Scores) -> tuple[Tensor, ...]:
        """(G, ranked) accumulated scores and flat indices width * V."""
        enough = scores.values.shape[1] >= min(self.ranked, scores.vocabulary)
        if scores.tokens is not None and scores.rest is not None and enough and not self.sampled:
            return self._pick_listed(batch, scores.values.numpy(), scores.tokens.numpy())
        values = scores.whole().values
        running = torch.tensor([s.score for s in batch.sequences], dtype=values.dtype)
        total = values + running.to(values.device)[:, None]
        total = total.reshape(len(batch.groups), -1)  # (G, W * V)
        if not self.sampled:
            return tuple(torch.topk(total, self.ranked))
        places = _group_places(batch, self.width)
        drawn = batch.draws.choose_without_replacement(
            torch.softmax(total, dim=-1), places, self.ranked
        )
        return total.gather(1, drawn.clamp(min=0)), drawn

    def _pick_listed(
        self, batch: Batch, values: np.ndarray, tokens: np.ndarray
    ) -> tuple[Tensor, ...]:
        """The same of the best of each beam; of equals the earlier beam's better one."""
        groups = np.arange(len(batch.groups))[:, None]
        running = np.array([s.score for s in batch.sequences], dtype=np.float32)
        total = (values + running[:, None]).reshape(len(groups), -1)  # (G, W * k)
        order = (-total).argsort(axis=1, kind="stable")[:, : self.ranked]
        flat = order // tokens.shape[1] * batch.vocabulary
        flat += tokens.reshape(total.shape)[groups, order]
        return torch.from_numpy(total[groups, order]), torch.from_numpy(flat)

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """Candidates that end are banked, the best others go on; all groups at once."""
        scores, flat = picked  # (G, ranked)
        require_drawn(flat)
        parent = flat // batch.vocabulary + np.arange(len(flat))[:, None] * self.width
        token = flat % batch.vocabulary
        _, reasons = batch.stops(parent.ravel(), token.reshape(-1, 1), np.array([1] * flat.size))
        ended = np.array([reason is not None for reason in reasons]).reshape(scores.shape)
        next_scores, next_ranks = _top(np.where(ended, scores + _NEVER, scores), self.width)
        banks = Banks.of(batch, self)
        entries = banks.enter(scores, ended)
        settled = banks.settle(next_scores[:, :1], ended).tolist()
        live = [g for g, one in enumerate(batch.groups) if not settled[g] or one.request.linger]
        group = [*(one.group for one in entries), *(g for g in live for _ in range(self.width))]
        rank = [*(one.rank for one in entries), *next_ranks[live].ravel().tolist()]
        score = [*(one.score for one in entries), *next_scores[live].ravel().tolist()]
        parents = parent[group, rank]
        return Children(
            parents,
            token[group, rank].reshape(-1, 1),
            np.array([1] * len(group), dtype=np.int64),
            np.array(score, dtype=np.float64),
            [reasons[one.group * self.ranked + one.rank] for one in entries]
            + [None] * (len(live) * self.width),
            memo=_memories(batch, parents, self.width, [one.serial for one in entries]),
            index=np.array([0] * len(entries) + [*range(self.width)] * len(live), dtype=np.int64),
            settled=tuple(g for g, over in enumerate(settled) if over),
        )

    def keep(self, group: Group) -> list[Finished]:
        """The `width` best of those that the bank holds, in its order, and that were cut short."""
        if not group.done:
            return []
        slots = _bank(group, self.width).serials.tolist()
        # Only what was cut short never asked for a place in the bank.
        held = [d for d in group.done if d.memo.get("serial") in (None, *slots)]

        def place(done: Finished) -> tuple[float, int]:
            serial = done.memo.get("serial")
            return -done.score, self.width if serial is None else slots.index(serial)

        return sorted(held, key=place)[: self.width]

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """The live beams that can still get among the `returns` best, and those finished."""
        best = self.keep(group)[: self.returns]
        processed = bool(group.request.processors)
        if len(best) < self.returns:
            # Bans may leave too few beams to end, and then a result is empty.
            few = [_NOTHING] if processed or group.settled else []
            return [] if group.settled else group.live, [*best, *few]
        if group.settled:
            return [], best
        if self.length_penalty < 0 or processed:
            return group.live, best
        # Scores are sums of log-probabilities: they fall, and the longest is divided by the most.
        divisor = self.max_new**self.length_penalty
        return [s for s in group.live if s.score / divisor >= best[-1].score], best

    def finish(self, group: Group) -> list[Finished]:
        """The `returns` best; an empty hypothesis where fewer have ended."""
        best = self.keep(group)[: self.returns]
        return best + [_NOTHING] * (self.returns - len(best))


@dataclass(slots=True)
class Bank:
    """The best finished scores of a request, (W,) float32, which are taken, whose they are, and
    whether more can come. `serials`: (W,) int64; `born`: how many were given out."""

    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: bool = True
    born: int = 0


class Entry(NamedTuple):
    """A candidate that a bank takes: whose, its rank, its final score and its serial number."""

    group: int
    rank: int
    score: float
    serial: int


@dataclass(slots=True)
class Banks:
    """The banks of G groups as one: `scores`, `filled`, `serials` (G, W); all else (G, 1).

    `power`, `horizon`: what the scores of this step, and the best score still possible, are
    divided by. `eager`: whether a full bank ends the search.
    """

    banks: list[Bank]
    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: np.ndarray
    power: np.ndarray
    horizon: np.ndarray
    eager: np.ndarray

    @classmethod
    def of(cls, batch: Batch, beam: Beam) -> Banks:
        """The banks of a batch; a group that opens has an empty one."""
        banks = [_bank(group, beam.width) for group in batch.groups]
        still = [bank.open and not g.settled for bank, g in zip(banks, batch.groups, strict=True)]
        lengths = [s.generated + 1 for s in batch.sequences[:: beam.width]]
        strategies: list[Beam] = [group.request.strategy for group in batch.groups]
        pairs = list(zip(strategies, lengths, strict=True))
        return cls(
            banks,
            np.concatenate([bank.scores for bank in banks]).reshape(-1, beam.width),
            np.concatenate([bank.filled for bank in banks]).reshape(-1, beam.width),
            np.concatenate([bank.serials for bank in banks]).reshape(-1, beam.width),
            np.array(still)[:, None],
            _divisors([length**own.length_penalty for own, length in pairs]),
            _divisors([own.horizon(length) ** own.length_penalty for own, length in pairs]),
            np.array([own.early_stopping is True for own in strategies])[:, None],
        )

    @property
    def full(self) -> np.ndarray:
        """(G, 1) whether a search ends because all places are taken."""
        return self.eager & self.filled.all(axis=1, keepdims=True)

    def enter(self, scores: np.ndarray, ended: np.ndarray) -> list[Entry]:
        """(G, ranked) candidates, and which ended -> those that the banks take."""
        width = self.scores.shape[1]
        just = ended & (np.arange(scores.shape[1]) < width) & self.open & ~self.full
        final = scores / self.power
        moved = self._moved(final, just)
        if not moved.any():
            return []
        serials = np.array([bank.born for bank in self.banks])[:, None] + np.arange(final.shape[1])
        merged = np.concatenate([self.scores, np.where(just, final, final + _NEVER)], axis=1)
        best_scores, best = _top(merged, width)
        groups = np.arange(len(best))[:, None]
        filled = np.concatenate([self.filled, just], axis=1)[groups, best]
        numbered = np.concatenate([self.serials, serials], axis=1)[groups, best]
        self.scores = np.where(moved, best_scores, self.scores)
        self.filled = np.where(moved, filled, self.filled)
        self.serials = np.where(moved, numbered, self.serials)
        taken = np.zeros(merged.shape, dtype=bool)
        taken[groups, best] = True
        entered = np.argwhere(taken[:, width:] & just).tolist()
        return [Entry(g, r, float(final[g, r]), int(serials[g, r])) for g, r in entered]

    def _moved(self, final: np.ndarray, just: np.ndarray) -> np.ndarray:
        """(G, 1) in which banks something moves when all candidates are ranked with what is held.

        What did not end ranks far below. It takes an empty place where its score is above 0, and
        may turn equals about, so that later ones fall otherwise.
        """
        equal = (self.scores[:, 1:] == self.scores[:, :-1]) & self.filled[:, 1:]
        moved: np.ndarray = just.any(axis=1) | (final > 0).any(axis=1) | equal.any(axis=1)
        return moved[:, None] & self.open & ~self.full

    def settle(self, best: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """(G, 1) best running scores -> (G,) whether no later hypothesis can change the result.

        Source: the reference's `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = np.where(self.filled, self.scores.min(axis=1, keepdims=True), _NEVER)
        self.open = self.open & (best / self.horizon > worst).any(axis=1, keepdims=True)
        still = self.open[:, 0].tolist()
        for g, bank in enumerate(self.banks):
            bank.scores, bank.filled, bank.serials = self.scores[g], self.filled[g], self.serials[g]
            bank.open = still[g]
            bank.born += ended.shape[1]
        over: np.ndarray = (~self.open | self.full | ended.all(axis=1, keepdims=True))[:, 0]
        return over


def _bank(group: Group, width: int) -> Bank:
    if "bank" not in group.memo:
        group.memo["bank"] = Bank(
            np.full(width, _NEVER, np.float32), np.zeros(width, bool), np.full(width, -1)
        )
    bank: Bank = group.memo["bank"]
    return bank


def _divisors(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)[:, None]


def _top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(G, n) -> (G, count) the best and their places; of equals those that torch would take."""
    order = (-scores).argsort(axis=1, kind="stable")
    ranked = scores[np.arange(len(scores))[:, None], order]
    if not (ranked[:, 1:] < ranked[:, :-1]).all():
        best = torch.topk(torch.from_numpy(scores), count)
        return best.values.numpy(), best.indices.numpy()
    return ranked[:, :count], order[:, :count]


def _group_places(batch: Batch, width: int) -> Places:
    """Where the draws of whole groups stand: at their first beam, in the place of the group."""
    firsts = [batch.sequences[g * width] for g in range(len(batch.groups))]
    seed = np.array([s.request.draws.seed & MAX_SEED for s in firsts], dtype=np.uint64)
    position = np.array([s.generated for s in firsts], dtype=np.uint64)
    slot = batch.slot[::width] // width
    return Places(seed, np.zeros(len(firsts), np.uint64), position, slot, batch.slots // width)


def _memories(
    batch: Batch, parents: np.ndarray, width: int, serials: list[int]
) -> list[dict[str, object] | None]:
    """What each child remembers: its beams as a chain (earlier chain, beam index in the call), and
    those that enter a bank, which come first, the serial number they have there."""
    memories: list[dict[str, object] | None] = []
    for child, parent in enumerate(parents.tolist()):
        beam = batch.groups[parent // width].rank * width + parent % width
        memory: dict[str, object] = {"beams": (batch.sequences[parent].memo.get("beams"), beam)}
        if child < len(serials):
            memory["serial"] = serials[child]
        memories.append(memory)
    return memories
