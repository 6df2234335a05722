"""Beam search and beam sampling: the best or the drawn continuations of all beams.

Scores accumulate in float32 and every ranking is a `topk` over the same layout as the reference's,
so that ties are broken alike. Source: the reference's vectorised `_beam_search`. One difference:
there the batch ends together, here each request ends when its own result can no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.strategies.single import Picked
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence
from everystep.types.stored import Chain, stored

_NEVER = -1.0e9
_NOTHING = Finished(np.empty(0, np.int64), _NEVER, FinishReason("length"), 0, 0, {})


@strategy("beam")
@dataclass(frozen=True)
class Beam:
    """`width` hypotheses go on; the `returns` best finished ones are the result.

    `eos_count`: how many end tokens the request has; (1 + eos_count), at least two, candidates are
    ranked for every beam, so that all can go on. `max_new`: the most tokens a hypothesis can have
    (for `early_stopping="never"`). `sampled`: candidates are drawn without replacement.
    """

    width: int
    returns: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos_count: int = 1
    max_new: int = 2**31
    sampled: bool = False
    streams: ClassVar[bool] = False
    rounds: ClassVar[int] = 1

    @cached_property
    def reads(self) -> Reads:
        """All ranked candidates may come from one beam; draws look at all tokens."""
        return Reads("log_probs", best=0 if self.sampled else self.ranked)

    @cached_property
    def ranked(self) -> int:
        """How many candidates are looked at."""
        return max(2, 1 + self.eos_count) * self.width

    def horizon(self, length: int) -> int:
        """The length at which a running beam of `length` tokens is judged."""
        late = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_new if late else length

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """(G, ranked) accumulated scores per request, and flat indices W * V."""
        enough = scores.values.shape[1] >= min(self.ranked, scores.vocabulary)
        if self.reads.best and scores.tokens is not None and scores.rest is not None and enough:
            return self._pick_listed(batch, scores.values.numpy(), scores.tokens.numpy())
        values = scores.whole().values
        running = torch.from_numpy(self._running(batch)).to(values)[:, None]
        total = (values + running).reshape(len(batch.groups), -1)  # (G, W * V)
        if not self.sampled:
            return tuple(torch.topk(total, self.ranked))
        drawn = batch.draws.choose_without_replacement(
            torch.softmax(total, dim=-1), batch.group_places(self.width), self.ranked
        )
        return total.gather(1, drawn.clamp(min=0)), drawn

    def _pick_listed(
        self, batch: Batch, values: np.ndarray, tokens: np.ndarray
    ) -> tuple[Tensor, ...]:
        """The same from the best of each beam; of equals the earlier beam's better one wins."""
        groups = np.arange(len(batch.groups))[:, None]
        total = (values + self._running(batch)[:, None]).reshape(len(groups), -1)  # (G, W * k)
        order = (-total).argsort(axis=1, kind="stable")[:, : self.ranked]
        flat = order // tokens.shape[1] * batch.vocabulary
        flat += tokens.reshape(total.shape)[groups, order]
        return torch.from_numpy(total[groups, order]), torch.from_numpy(flat)

    def _running(self, batch: Batch) -> np.ndarray:
        """(S,) float32 accumulated scores; of equal siblings only the first counts."""
        running = np.array([s.score for s in batch.sequences], dtype=np.float32)
        for g, group in enumerate(batch.groups):
            if not group.opened:
                running[g * self.width + 1 : (g + 1) * self.width] = _NEVER
        return running

    def _candidates(self, batch: Batch, picked: Picked) -> RankedBeams:
        """What was picked, request by request."""
        scores, flat = picked[0]
        first = np.arange(len(batch.groups))[:, None] * self.width
        parent, token = flat // batch.vocabulary + first, flat % batch.vocabulary
        drawn = flat >= 0
        parent, token = np.where(drawn, parent, first), np.where(drawn, token, 0)
        reasons = batch.stops(parent.ravel(), token.ravel())
        ended = np.array([reason is not None for reason in reasons]).reshape(scores.shape)
        going, ranks = _top(np.where(ended, scores + _NEVER, scores), self.width)
        whole = np.logical_and.reduce(drawn, axis=1)
        return RankedBeams(scores, parent, token, ended, reasons, going, ranks, whole)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Candidates that end are banked, the best others go on."""
        found = self._candidates(batch, picked)
        lengths = [s.generated + 1 for s in batch.sequences[:: self.width]]
        power = _divisors([length**self.length_penalty for length in lengths])
        horizon = _divisors([self.horizon(n) ** self.length_penalty for n in lengths])
        final = found.scores / power
        empty = BeamBank.empty(self.width)
        before = BeamBank.joined([group.state or empty for group in batch.groups])
        bank, search, rank, serial = before.enter(final, found.ended, lengths, self)
        bank, settled = bank.settle(found.going[:, :1] / horizon, found.ended, self)
        lost = ~found.drawn
        over = settled & ~lost
        stays = ~over | [group.request.linger for group in batch.groups]
        live = stays.nonzero()[0]  # requests that go on
        finish = [found.reasons[place] for place in (search * self.ranked + rank).tolist()]
        finish += [
            undrawable() if gone else None for gone in lost[live].repeat(self.width).tolist()
        ]
        places = np.tile(np.arange(self.width), len(live))
        owner = np.concatenate([search, live.repeat(self.width)])
        ranks = np.concatenate([rank, found.ranks[live].ravel()])
        parents = found.parent[owner, ranks]
        states = held = None
        if bank is not before:
            states = bank.of_requests()
            held = [frozenset(own.serials.ravel().tolist()) for own in states]
        return Children(
            parents,
            found.token[owner, ranks].reshape(-1, 1),
            np.ones(len(owner), dtype=np.int64),
            np.concatenate([final[search, rank], found.going[live].ravel()]).astype(np.float64),
            finish,
            memo=self._paths(batch, parents),
            index=np.concatenate([np.zeros_like(search), places]),
            serial=np.concatenate([serial, np.full(places.size, -1)]),
            settled=tuple(over.nonzero()[0].tolist()),
            states=states,
            held=held,
        )

    def _paths(self, batch: Batch, parents: np.ndarray) -> list[dict[str, object] | None]:
        """What each child remembers: its beams in the call, one after another."""
        paths: list[dict[str, object] | None] = []
        for parent in parents.tolist():
            beam = batch.groups[parent // self.width].rank * self.width + parent % self.width
            paths.append({"beams": Chain(beam, batch.sequences[parent].memo.get("beams"))})
        return paths

    def best(self, group: Group) -> list[Finished]:
        """The `width` best of what the banks hold, in their order, and of what was cut short."""
        slots: list[int] = group.state.serials.ravel().tolist() if group.state else []

        def place(done: Finished) -> tuple[float, int]:
            # Only what was cut short was never offered to the bank.
            return -done.score, self.width if done.serial < 0 else slots.index(done.serial)

        held = [done for done in group.done if done.serial < 0 or done.serial in slots]
        return sorted(held, key=place)[: self.width]

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """The live beams that can still get among the `returns` best, and those finished."""
        best = self.best(group)[: self.returns]
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
        best = self.best(group)[: self.returns]
        return best + [_NOTHING] * (self.returns - len(best))


class RankedBeams(NamedTuple):
    """What N searches chose from: (N, ranked) `scores`, `parent` (in the batch), `token`, `ended`;
    `reasons`, flat; (N, W) scores and ranks of those that go on; (N,) whether all were drawn.
    """

    scores: np.ndarray
    parent: np.ndarray
    token: np.ndarray
    ended: np.ndarray
    reasons: list[FinishReason | None]
    going: np.ndarray
    ranks: np.ndarray
    drawn: np.ndarray


@stored("bank")
@dataclass(frozen=True, eq=False)
class BeamBank:
    """The best finished scores of N searches, (N, W) float32, which of them are taken, and the
    numbers of their hypotheses; (N, 1) whether more can come."""

    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: np.ndarray

    @classmethod
    def empty(cls, width: int) -> BeamBank:
        """Before anything has ended."""
        places = (1, width)
        return cls(
            np.full(places, _NEVER, np.float32),
            np.zeros(places, bool),
            np.full(places, -1),
            np.ones((1, 1), bool),
        )

    @classmethod
    def joined(cls, banks: list[BeamBank]) -> BeamBank:
        """The banks of several requests as one."""
        return cls(*map(np.concatenate, zip(*(bank._arrays for bank in banks), strict=True)))

    def of_requests(self) -> list[BeamBank]:
        """The bank of each request."""
        firsts = range(len(self.scores))
        return [BeamBank(*(one[n : n + 1] for one in self._arrays)) for n in firsts]

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.scores, self.filled, self.serials, self.open

    def _takes(self, beam: Beam) -> np.ndarray:
        """(N, 1) whether more can come: with `early_stopping=True` only until all places are
        taken."""
        if beam.early_stopping is not True:
            return self.open
        return self.open & ~np.logical_and.reduce(self.filled, axis=1, keepdims=True)

    def enter(
        self, final: np.ndarray, ended: np.ndarray, lengths: list[int], beam: Beam
    ) -> tuple[BeamBank, np.ndarray, np.ndarray, np.ndarray]:
        """(N, ranked) candidates of N lengths, and which ended -> the bank with those that it
        takes, and of these the search, rank and number."""
        width, place = self.scores.shape[1], np.arange(beam.ranked)
        just = ended & (place < width) & self._takes(beam)
        moved = self._moved(final, just, beam)
        if not moved.any():
            none = np.empty(0, np.int64)
            return self, none, none, none
        groups = np.arange(len(final))[:, None]
        # No two candidates of a request get the same number: every step has another length.
        serials = np.array(lengths)[:, None] * beam.ranked + place
        merged = np.concatenate([self.scores, np.where(just, final, final + _NEVER)], axis=1)
        best_scores, best = _top(merged, width)
        filled = np.concatenate([self.filled, just], axis=1)[groups, best]
        numbered = np.concatenate([self.serials, serials], axis=1)[groups, best]
        taken = np.zeros(merged.shape, dtype=bool)
        taken[groups, best] = True
        search, rank = (taken[:, width:] & just).nonzero()
        after = replace(
            self,
            scores=np.where(moved, best_scores, self.scores),
            filled=np.where(moved, filled, self.filled),
            serials=np.where(moved, numbered, self.serials),
        )
        return after, search, rank, serials[search, rank]

    def _moved(self, final: np.ndarray, just: np.ndarray, beam: Beam) -> np.ndarray:
        """(N, 1) which banks change when all candidates are ranked with what the banks hold.

        A candidate that did not end ranks far below. It takes an empty place where its score is
        above 0, and may reorder equals, so that later ties are broken differently.
        """
        equal = (self.scores[:, 1:] == self.scores[:, :-1]) & self.filled[:, 1:]
        moved: np.ndarray = just.any(axis=1) | (final > 0).any(axis=1) | equal.any(axis=1)
        return moved[:, None] & self._takes(beam)

    def settle(
        self, best: np.ndarray, ended: np.ndarray, beam: Beam
    ) -> tuple[BeamBank, np.ndarray]:
        """(N, 1) best final scores still possible -> (N,) whether no later hypothesis can change
        the result, which closes the bank.

        Source: the reference's `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = np.where(self.filled, self.scores.min(axis=1, keepdims=True), _NEVER)
        going = self._takes(beam) & (best > worst).any(axis=1, keepdims=True)
        over: np.ndarray = ~going | ended.all(axis=1, keepdims=True)
        same = np.array_equal(over, ~self.open)
        return self if same else replace(self, open=~over), over[:, 0]


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
