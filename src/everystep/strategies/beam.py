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
from everystep.strategies.base import MAX_SEED, Batch, Drafts, require_drawn
from everystep.types import Best, Children, Finished, FinishReason, Group, Sequence, TokenTable

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
    scores: ClassVar[Literal["logits", "log_probs"]] = "log_probs"
    shortlists: ClassVar[bool] = False
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
    def enough(self) -> int:
        """All ranked candidates may come from one beam; draws look at every token."""
        return 0 if self.sampled else self.ranked

    def horizon(self, length: int) -> int:
        """The length at which a running beam of `length` tokens is judged."""
        late = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_new if late else length

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
        return total.gather(1, drawn.clamp(min=0)), drawn

    def pick_best(self, batch: Batch, best: Best) -> tuple[np.ndarray, ...]:
        """The same of the best scores of each beam; of equals the earlier beam's better one."""
        count = len(batch.groups)
        running = np.array([s.score for s in batch.sequences], dtype=np.float32)
        total = (best.values + running[:, None]).reshape(count, -1)  # (G, W * k)
        beam = np.arange(len(batch))[:, None] % self.width
        flat = (beam * batch.vocabulary + best.tokens).reshape(count, -1)
        order = np.argsort(-total, axis=1, kind="stable")[:, : self.ranked]
        return np.take_along_axis(total, order, axis=1), np.take_along_axis(flat, order, axis=1)

    def select(self, batch: Batch, picked: tuple[np.ndarray, ...]) -> Children:
        """Candidates that end are banked, the best others go on; all groups at once."""
        scores, flat = torch.from_numpy(picked[0]), picked[1]  # (G, ranked)
        require_drawn(flat)
        parent = flat // batch.vocabulary + np.arange(len(flat))[:, None] * self.width
        token = flat % batch.vocabulary
        _, reasons = batch.stops(parent.ravel(), token.reshape(-1, 1), np.ones(flat.size, int))
        ended = torch.tensor([reason is not None for reason in reasons]).reshape(scores.shape)
        next_scores, next_ranks = torch.topk(scores + ended * _NEVER, self.width)
        banks = Banks.of(batch, self)
        final, entered, serials = banks.enter(scores, ended)
        settled = banks.settle(next_scores[:, :1], ended)
        goes = ~settled | np.array([group.request.linger for group in batch.groups])
        born = np.argwhere(entered)  # (n, 2): group, rank
        live = np.flatnonzero(goes)
        group = np.concatenate([born[:, 0], np.repeat(live, self.width)])
        rank = np.concatenate([born[:, 1], next_ranks.numpy()[live].ravel()])
        score = np.concatenate([final[entered], next_scores.numpy()[live].ravel()])
        finish = [reasons[g * self.ranked + r] for g, r in born] + [None] * (len(live) * self.width)
        index = np.concatenate(
            [np.zeros(len(born), int), np.tile(np.arange(self.width), len(live))]
        )
        parents = parent[group, rank]
        return Children(
            parents,
            token[group, rank].reshape(-1, 1),
            np.ones(len(parents), dtype=np.int64),
            score.astype(np.float64),
            finish,
            memo=_memories(batch, parents, self.width, serials[entered].tolist()),
            index=index,
            settled=tuple(np.flatnonzero(settled).tolist()),
        )

    def keep(self, group: Group) -> list[Finished]:
        """The `width` best of those that the bank holds, in its order, and that were cut short."""
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

    scores: Tensor
    filled: Tensor
    serials: Tensor
    open: bool = True
    born: int = 0


@dataclass(slots=True)
class Banks:
    """The banks of G groups as one: `scores`, `filled`, `serials` (G, W); all else (G, 1).

    `power`, `horizon`: what the scores of this step, and the best score still possible, are
    divided by. `eager`: whether a full bank ends the search.
    """

    banks: list[Bank]
    scores: Tensor
    filled: Tensor
    serials: Tensor
    open: Tensor
    power: Tensor
    horizon: Tensor
    eager: Tensor

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
            torch.stack([bank.scores for bank in banks]),
            torch.stack([bank.filled for bank in banks]),
            torch.stack([bank.serials for bank in banks]),
            _column(still),
            _column([length**own.length_penalty for own, length in pairs]),
            _column([own.horizon(length) ** own.length_penalty for own, length in pairs]),
            _column([own.early_stopping is True for own in strategies]),
        )

    def enter(self, scores: Tensor, ended: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(G, ranked) candidates and which ended -> their final scores, who enters, serials."""
        width = self.scores.shape[1]
        final = scores / self.power
        closed = ~self.open | (self.eager & self.filled.all(dim=1, keepdim=True))
        just = ended & (torch.arange(scores.shape[1]) < width) & ~closed
        merged = torch.cat([self.scores, final + ~just * _NEVER], dim=1)
        best = torch.topk(merged, width).indices
        self.scores = merged.gather(1, best)
        self.filled = torch.cat([self.filled, just], dim=1).gather(1, best)
        serials = _column([bank.born for bank in self.banks]) + torch.arange(scores.shape[1])
        self.serials = torch.cat([self.serials, serials], dim=1).gather(1, best)
        taken = torch.zeros(merged.shape, dtype=torch.bool).scatter_(1, best, True)[:, width:]
        return final.numpy(), (taken & just).numpy(), serials.numpy()

    def settle(self, best: Tensor, ended: Tensor) -> np.ndarray:
        """(G, 1) best running scores -> (G,) whether no later hypothesis can change the result.

        Source: the reference's `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = torch.where(self.filled, self.scores.amin(dim=1, keepdim=True), _NEVER)
        self.open = self.open & (best / self.horizon > worst).any(dim=1, keepdim=True)
        for g, bank in enumerate(self.banks):
            bank.scores, bank.filled, bank.serials = self.scores[g], self.filled[g], self.serials[g]
            bank.open = bool(self.open[g, 0])
            bank.born += ended.shape[1]
        full = self.eager & self.filled.all(dim=1, keepdim=True)
        return (~self.open | full | ended.all(dim=1, keepdim=True))[:, 0].numpy()


def _bank(group: Group, width: int) -> Bank:
    if "bank" not in group.memo:
        group.memo["bank"] = Bank(
            torch.full((width,), _NEVER),
            torch.zeros(width, dtype=torch.bool),
            torch.full((width,), -1),
        )
    bank: Bank = group.memo["bank"]
    return bank


def _column(values: list[float] | list[bool] | list[int]) -> Tensor:
    return torch.tensor(values)[:, None]


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
