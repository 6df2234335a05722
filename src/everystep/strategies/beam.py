"""Beam search, beam sampling and diverse beams: the best or the drawn continuations of all beams.

A request is one search over `width` beams, or several over equal shares of them that choose one
after another, each away from what the earlier ones chose (diverse beams). Scores accumulate in
float32 and every ranking is a `topk` over the same layout as the reference's, so that ties are
broken alike. Sources: the reference's vectorised `_beam_search`; Vijayakumar et al. 2018 for
diverse beams. One difference: there the batch ends together, here each request ends when its own
result can no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    (for `early_stopping="never"`). `sampled`: candidates are drawn without replacement. `searches`:
    into how many searches the beams are divided; a token loses `diversity` for every earlier search
    that chose it in the same step.
    """

    width: int
    returns: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos_count: int = 1
    max_new: int = 2**31
    sampled: bool = False
    searches: int = 1
    diversity: float = 0.0
    streams: ClassVar[bool] = False

    @property
    def rounds(self) -> int:
        return self.searches

    @property
    def reads(self) -> Reads:
        """All ranked candidates may come from one beam; draws and penalties look at all tokens."""
        whole = self.sampled or self.searches > 1
        return Reads("log_probs", best=0 if whole else self.ranked)

    @property
    def beams(self) -> int:
        """How many beams a search has."""
        return self.width // self.searches

    @property
    def ranked(self) -> int:
        """How many candidates of a search are looked at."""
        return max(2, 1 + self.eos_count) * self.beams

    def horizon(self, length: int) -> int:
        """The length at which a running beam of `length` tokens is judged."""
        late = self.early_stopping == "never" and self.length_penalty > 0.0
        return self.max_new if late else length

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """(G, ranked) accumulated scores of one search per request, and flat indices beams * V."""
        enough = scores.values.shape[1] >= min(self.ranked, scores.vocabulary)
        if self.reads.best and scores.tokens is not None and scores.rest is not None and enough:
            return self._pick_listed(batch, scores.values.numpy(), scores.tokens.numpy())
        values = scores.whole().values
        running = torch.from_numpy(self._running(batch)).to(values)[:, None]
        if self.searches > 1:
            own = self._beams_of(batch, len(earlier))
            penalty = self._penalty(batch, values, earlier)
            values, running = values[own] - penalty.repeat_interleave(self.beams, 0), running[own]
        total = (values + running).reshape(len(batch.groups), -1)  # (G, beams * V)
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
        """(S,) float32 accumulated scores; of equal siblings only the first of a search counts."""
        running = np.array([s.score for s in batch.sequences], dtype=np.float32)
        for g, group in enumerate(batch.groups):
            if not group.opened:
                own = running[g * self.width : (g + 1) * self.width].reshape(self.searches, -1)
                own[:, 1:] = _NEVER
        return running

    def _beams_of(self, batch: Batch, search: int) -> Tensor:
        """(G * beams,) the rows of one search of every request."""
        first = np.arange(len(batch.groups))[:, None] * self.width + search * self.beams
        return torch.from_numpy((first + np.arange(self.beams)).ravel())

    def _penalty(self, batch: Batch, scores: Tensor, earlier: Picked) -> Tensor:
        """(G, V) what each token loses for the earlier searches that chose it."""
        counts = np.zeros((len(batch.groups), batch.vocabulary), np.float32)
        for search, picked in enumerate(earlier):
            found = self._candidates(batch, (picked,), [search])
            chosen = found.token[np.arange(len(counts))[:, None], found.ranks]
            np.add.at(counts, (np.arange(len(counts))[:, None], chosen), 1.0)
        return torch.from_numpy(counts * np.float32(self.diversity)).to(scores)

    def _candidates(self, batch: Batch, picked: Picked, searches: list[int]) -> RankedBeams:
        """What was picked in the given searches, request by request, as N = G * len(searches)."""
        scores = np.stack([one[0] for one in picked], axis=1).reshape(-1, self.ranked)
        flat = np.stack([one[1] for one in picked], axis=1).reshape(-1, self.ranked)
        first = np.arange(len(batch.groups))[:, None] * self.width
        first = (first + np.array(searches) * self.beams).reshape(-1, 1)
        parent, token = flat // batch.vocabulary + first, flat % batch.vocabulary
        drawn = flat >= 0
        parent, token = np.where(drawn, parent, first), np.where(drawn, token, 0)
        reasons = batch.stops(parent.ravel(), token.ravel())
        ended = np.array([reason is not None for reason in reasons]).reshape(scores.shape)
        going, ranks = _top(np.where(ended, scores + _NEVER, scores), self.beams)
        whole = np.logical_and.reduce(drawn, axis=1)
        return RankedBeams(scores, parent, token, ended, reasons, going, ranks, whole)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Candidates that end are banked, the best others go on; all searches at once."""
        found = self._candidates(batch, picked, [*range(self.searches)])
        banks = Banks.of(batch, self)
        entries = banks.enter(found.scores, found.ended)
        lost = np.logical_or.reduce((~found.drawn).reshape(-1, self.searches), axis=1)
        settled = banks.settle(found.going[:, :1], found.ended).reshape(-1, self.searches)
        over = np.logical_and.reduce(settled, axis=1) & ~lost
        live = [
            g * self.searches + search
            for g, group in enumerate(batch.groups)
            if not over[g] or group.request.linger
            for search in range(self.searches)
        ]
        search = [*(one.search for one in entries), *(n for n in live for _ in range(self.beams))]
        rank = [*(one.rank for one in entries), *found.ranks[live].ravel().tolist()]
        score = [*(one.score for one in entries), *found.going[live].ravel().tolist()]
        finish: list[FinishReason | None] = [
            found.reasons[one.search * self.ranked + one.rank] for one in entries
        ]
        finish += [
            undrawable() if lost[n // self.searches] else None
            for n in live
            for _ in range(self.beams)
        ]
        parents = found.parent[search, rank]
        none = [-1] * (len(live) * self.beams)
        places = [n % self.searches * self.beams + i for n in live for i in range(self.beams)]
        states = banks.states()
        return Children(
            parents,
            found.token[search, rank].reshape(-1, 1),
            np.array([1] * len(search), dtype=np.int64),
            np.array(score, dtype=np.float64),
            finish,
            memo=self._paths(batch, parents),
            index=np.array([0] * len(entries) + places, dtype=np.int64),
            serial=np.array([one.serial for one in entries] + none, dtype=np.int64),
            settled=tuple(np.flatnonzero(over).tolist()),
            states=states,
            held=[frozenset(n for one in banks for n in one.serials.tolist()) for banks in states],
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
        slots: list[int] = [n for bank in group.state or () for n in bank.serials.tolist()]

        def place(done: Finished) -> tuple[float, int]:
            # Only what was cut short was never offered to the bank.
            return -done.score, self.width if done.serial < 0 else slots.index(done.serial)

        held = [done for done in group.done if done.serial < 0 or done.serial in slots]
        return sorted(held, key=place)[: self.width]

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """The live beams that can still get among the `returns` best, and those finished."""
        best = self.best(group)[: self.returns]
        processed = bool(group.request.processors) or self.searches > 1
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
    `reasons`, flat; (N, beams) scores and ranks of those that go on; (N,) whether all were drawn.
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
    """The best finished scores of a search, (W,) float32, which are taken, whose they are, and
    whether more can come. `serials`: (W,) int64; `born`: how many were given out."""

    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: bool = True
    born: int = 0

    @classmethod
    def empty(cls, beams: int) -> BeamBank:
        """Before anything has ended."""
        return cls(np.full(beams, _NEVER, np.float32), np.zeros(beams, bool), np.full(beams, -1))


class Entry(NamedTuple):
    """A candidate that a bank takes: whose, its rank, its final score and its serial number."""

    search: int
    rank: int
    score: float
    serial: int


@dataclass(slots=True)
class Banks:
    """The banks of N searches as one: `scores`, `filled`, `serials` (N, W); all else (N, 1).

    `power`, `horizon`: what the scores of this step, and the best score still possible, are
    divided by. `eager`: whether a full bank ends the search. `searches`: of each request.
    """

    banks: list[BeamBank]
    scores: np.ndarray
    filled: np.ndarray
    serials: np.ndarray
    open: np.ndarray
    power: np.ndarray
    horizon: np.ndarray
    eager: bool
    searches: int
    ranked: int

    @classmethod
    def of(cls, batch: Batch, beam: Beam) -> Banks:
        """The banks of a batch; a group that opens has empty ones."""
        none = (BeamBank.empty(beam.beams),) * beam.searches
        banks = [bank for group in batch.groups for bank in group.state or none]
        lengths = [s.generated + 1 for s in batch.sequences[:: beam.beams]]
        return cls(
            banks,
            np.concatenate([bank.scores for bank in banks]).reshape(-1, beam.beams),
            np.concatenate([bank.filled for bank in banks]).reshape(-1, beam.beams),
            np.concatenate([bank.serials for bank in banks]).reshape(-1, beam.beams),
            np.array([bank.open for bank in banks])[:, None],
            _divisors([length**beam.length_penalty for length in lengths]),
            _divisors([beam.horizon(length) ** beam.length_penalty for length in lengths]),
            beam.early_stopping is True,
            beam.searches,
            beam.ranked,
        )

    @property
    def full(self) -> np.ndarray:
        """(N, 1) whether a search ends because all places are taken."""
        return np.logical_and.reduce(self.filled, axis=1, keepdims=True) & self.eager

    def enter(self, scores: np.ndarray, ended: np.ndarray) -> list[Entry]:
        """(N, ranked) candidates, and which ended -> those that the banks take."""
        width = self.scores.shape[1]
        just = ended & (np.arange(scores.shape[1]) < width) & self.open & ~self.full
        final = scores / self.power
        moved = self._moved(final, just)
        if not moved.any():
            return []
        born = np.array([bank.born for bank in self.banks])[:, None] + np.arange(final.shape[1])
        # No two searches of a request give out the same number.
        serials = born * self.searches + np.arange(len(born))[:, None] % self.searches
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
        """(N, 1) which banks change when all candidates are ranked with what the banks hold.

        A candidate that did not end ranks far below. It takes an empty place where its score is
        above 0, and may reorder equals, so that later ties are broken differently.
        """
        equal = (self.scores[:, 1:] == self.scores[:, :-1]) & self.filled[:, 1:]
        moved: np.ndarray = just.any(axis=1) | (final > 0).any(axis=1) | equal.any(axis=1)
        return moved[:, None] & self.open & ~self.full

    def settle(self, best: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """(N, 1) best running scores -> (N,) whether no later hypothesis can change the result.

        Source: the reference's `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = np.where(self.filled, self.scores.min(axis=1, keepdims=True), _NEVER)
        self.open = self.open & (best / self.horizon > worst).any(axis=1, keepdims=True)
        over: np.ndarray = ~self.open | self.full | ended.all(axis=1, keepdims=True)
        self.open = self.open & ~over
        return over[:, 0]

    def states(self) -> list[tuple[BeamBank, ...]]:
        """The banks of every request after this step."""
        rows = zip(
            self.banks,
            self.scores,
            self.filled,
            self.serials,
            self.open[:, 0].tolist(),
            strict=True,
        )
        after = [
            replace(bank, scores=s, filled=f, serials=n, open=o, born=bank.born + self.ranked)
            for bank, s, f, n, o in rows
        ]
        step = self.searches
        return [tuple(after[n : n + step]) for n in range(0, len(after), step)]


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
