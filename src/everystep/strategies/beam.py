"""Beam search and beam sampling: the best or the drawn continuations of all beams.

Scores accumulate in float32 and every ranking is a `topk` over the same layout as transformers',
so that ties are broken alike. Source: transformers' vectorised `_beam_search`. One difference:
there the batch ends together, here each request ends when its own result can no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.strategies.beams import (
    NEVER,
    NOTHING,
    BeamSettings,
    accumulated,
    candidates_of,
    filled_up,
    horizon,
    is_found,
    paths,
)
from everystep.strategies.single import Picked
from everystep.types import Children, Finished, FinishReason, Group, Scores, Sequence
from everystep.types.stored import stored


@strategy("beam")
@dataclass(frozen=True)
class Beam(BeamSettings):
    """`width` hypotheses go on; the `returns` best finished ones are the result.

    `sampled`: candidates are drawn without replacement. `keeps`: how many finished hypotheses
    are ranked before the search may stop, where that is more than its beams. `gathers`: every
    finished hypothesis is kept, also those that are not ranked, so that a search can go on for
    more of them; see `widened`.
    """

    sampled: bool = False
    keeps: int = 0
    gathers: bool = False
    streams: ClassVar[bool] = False
    rounds: ClassVar[int] = 1

    @cached_property
    def reads(self) -> Reads:
        """All ranked candidates may come from one beam; draws look at all tokens."""
        return Reads("log_probs", best=0 if self.sampled else self.ranked)

    @cached_property
    def slots(self) -> int:
        """The number of finished hypotheses that are ranked."""
        return max(self.width, self.keeps)

    @cached_property
    def ranked(self) -> int:
        """The number of candidates that are looked at."""
        return candidates_of(self.width, self.eos_count)

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Return (G, ranked) accumulated scores per request, and flat indices W * V."""
        enough = scores.values.shape[1] >= min(self.ranked, scores.vocabulary)
        if self.reads.best and scores.tokens is not None and scores.rest is not None and enough:
            return self._pick_listed(batch, scores.values.numpy(), scores.tokens.numpy())
        values = scores.whole().values
        running = accumulated(batch.sequences, batch.groups, self.width)
        total = values + on_device(values.device, running, values.dtype)[:, None]
        total = total.reshape(len(batch.groups), -1)  # (G, W * V)
        if not self.sampled:
            return tuple(torch.topk(total, self.ranked))
        drawn = batch.draws.choose_without_replacement(
            torch.softmax(total, dim=-1), batch.group_places(self.width), self.ranked
        )
        return total.gather(1, drawn.clamp(min=0)), drawn

    def _pick_listed(
        self, batch: Batch, values: np.ndarray, tokens: np.ndarray
    ) -> tuple[Tensor, ...]:
        """Pick from the best of each beam; of equals the earlier beam's better one wins."""
        groups = np.arange(len(batch.groups))[:, None]
        running = accumulated(batch.sequences, batch.groups, self.width)
        total = (values + running[:, None]).reshape(len(groups), -1)  # (G, W * k)
        # As in topk, nan is the highest.
        order = np.where(np.isnan(total), -np.inf, -total).argsort(axis=1, kind="stable")
        order = order[:, : self.ranked]
        flat = order // tokens.shape[1] * batch.vocabulary
        flat += tokens.reshape(total.shape)[groups, order]
        return torch.from_numpy(total[groups, order]), torch.from_numpy(flat)

    def _candidates(self, batch: Batch, picked: Picked) -> RankedBeams:
        """Return the picked candidates, request by request."""
        scores, flat = picked[0]
        first = np.arange(len(batch.groups))[:, None] * self.width
        parent, token = flat // batch.vocabulary + first, flat % batch.vocabulary
        drawn = (flat >= 0) & ~np.isnan(scores)
        parent, token = np.where(drawn, parent, first), np.where(drawn, token, 0)
        reasons = batch.stops(parent.ravel(), token.ravel())
        ended = np.array([reason is not None for reason in reasons]).reshape(scores.shape)
        going, ranks = top(np.where(ended, scores + NEVER, scores), self.width)
        whole = np.logical_and.reduce(drawn, axis=1)
        return RankedBeams(scores, parent, token, ended, reasons, going, ranks, whole)

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Bank the candidates that end, and let the best others go on."""
        found = self._candidates(batch, picked)
        lengths = [s.generated + 1 for s in batch.sequences[:: self.width]]
        power = divisors([length**self.length_penalty for length in lengths])
        judged = divisors([horizon(self, n) ** self.length_penalty for n in lengths])
        final = found.scores / power
        empty = BeamBank.empty(self.slots)
        before = BeamBank.joined([group.state or empty for group in batch.groups])
        bank, search, rank, serial = before.enter(final, found.ended, lengths, self)
        bank, settled = bank.settle(found.going[:, :1] / judged, found.ended, self)
        possible = (found.scores > -np.inf).any(axis=1) | before.filled.any(axis=1)
        lost = ~(found.drawn & possible)
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
            if not self.gathers:
                held = [frozenset(own.serials.ravel().tolist()) for own in states]
        return Children(
            parents,
            found.token[owner, ranks].reshape(-1, 1),
            np.ones(len(owner), dtype=np.int64),
            np.concatenate([final[search, rank], found.going[live].ravel()]).astype(np.float64),
            finish,
            memo=paths(batch, self.width, parents.tolist()),
            index=np.concatenate([np.zeros_like(search), places]),
            serial=np.concatenate([serial, np.full(places.size, -1)]),
            settled=tuple(over.nonzero()[0].tolist()),
            states=states,
            held=held,
        )

    def best(self, group: Group) -> list[Finished]:
        """Return the best of the banked and of the cut hypotheses, in their order."""
        serials = group.state.serials.ravel().tolist() if group.state else []
        slots = {serial: place for place, serial in enumerate(serials)}

        def place(done: Finished) -> tuple[float, int]:
            # Only what was cut short was never offered to the bank.
            return -done.score, self.width if done.serial < 0 else slots[done.serial]

        held = [done for done in group.done if done.serial < 0 or done.serial in slots]
        return sorted(filter(self.came_to, held), key=place)[: self.slots]

    def widened(self, group: Group) -> BeamBank:
        """Return the bank that this search would have, had it run from the start, of a group whose
        search of fewer `keeps` is over.

        Live beams do not depend on what is kept, the narrower search stopped first, and its
        hypotheses were gathered.
        """
        every = sorted((one for one in group.done if one.serial >= 0), key=lambda one: -one.score)
        bank, count = BeamBank.empty(self.slots), len(every[: self.slots])
        bank.scores[0, :count] = [one.score for one in every[:count]]
        bank.serials[0, :count] = [one.serial for one in every[:count]]
        bank.filled[0, :count] = True
        best = max(sequence.score for sequence in group.live)
        judged = divisors([horizon(self, group.live[0].generated) ** self.length_penalty])
        # Where all candidates ended, what is live is none of them.
        spent = np.array([[best < NEVER / 2]])
        return bank.settle(np.array([[best]], np.float32) / judged, spent, self)[0]

    def knows(self, state: object) -> bool:
        """Return whether one of its groups may have this bank, or none before anything ended."""
        return state is None or (isinstance(state, BeamBank) and state.holds(self.slots))

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """Return the live beams that can still get among the `returns` best, and the finished."""
        best = self.best(group)[: self.returns]
        request = group.request
        processed = bool(request.processors)
        if len(best) < self.returns:
            # Bans may leave too few beams to end, as may forced tokens, readouts that leave likely
            # tokens only, few tokens, and the length; then a result is empty.
            banned = processed or bool(request.hooks) or request.readout is not None
            few_tokens = not all(is_found(one.score) for one in group.live)
            scarce = banned or few_tokens or group.settled or self.returns > self.width
            few = [NOTHING] if scarce else []
            return [] if group.settled else group.live, [*best, *few]
        if group.settled:
            return [], best
        if self.length_penalty < 0 or processed:
            return group.live, best
        # Scores are sums of log-probabilities: they fall, and the longest is divided by the most.
        divisor = self.max_new**self.length_penalty
        return [s for s in group.live if s.score / divisor >= best[-1].score], best

    def finish(self, group: Group) -> list[Finished]:
        """Return the `returns` best; an empty hypothesis where fewer have ended."""
        return filled_up(self.best(group)[: self.returns], self.returns)


class RankedBeams(NamedTuple):
    """The candidates of N searches.

    (N, ranked) `scores`, `parent` (in the batch), `token`, `ended`; `reasons`, flat; (N, W) scores
    and ranks of those that go on; (N,) whether all were drawn.
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
        """Return the bank of a search in which nothing has ended."""
        places = (1, width)
        return cls(
            np.full(places, NEVER, np.float32),
            np.zeros(places, bool),
            np.full(places, -1),
            np.ones((1, 1), bool),
        )

    @classmethod
    def joined(cls, banks: list[BeamBank]) -> BeamBank:
        """Join the banks of several requests into one."""
        return cls(*map(np.concatenate, zip(*(bank._arrays for bank in banks), strict=True)))

    def holds(self, width: int) -> bool:
        """Return whether this is the bank of one search, with so many places."""
        kinds = ((np.float32, width), (np.bool_, width), (np.int64, width), (np.bool_, 1))
        return all(
            one.dtype == dtype and one.shape == (1, count)
            for one, (dtype, count) in zip(self._arrays, kinds, strict=True)
        )

    def of_requests(self) -> list[BeamBank]:
        """Return the bank of each request."""
        firsts = range(len(self.scores))
        return [BeamBank(*(one[n : n + 1] for one in self._arrays)) for n in firsts]

    @property
    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.scores, self.filled, self.serials, self.open

    def _takes(self, beam: Beam) -> np.ndarray:
        """Return (N, 1) whether more can come: with `early_stopping=True` only until all places
        are taken."""
        if beam.early_stopping is not True:
            return self.open
        return self.open & ~np.logical_and.reduce(self.filled, axis=1, keepdims=True)

    def enter(
        self, final: np.ndarray, ended: np.ndarray, lengths: list[int], beam: Beam
    ) -> tuple[BeamBank, np.ndarray, np.ndarray, np.ndarray]:
        """Enter the (N, ranked) candidates of N lengths that `ended`.

        Returns the bank with those that it takes, and of these, or of all where they are gathered,
        the search, rank and number.
        """
        width, place = self.scores.shape[1], np.arange(beam.ranked)
        complete = ended & (place < beam.width)
        just = complete & self._takes(beam)
        moved = self._moved(final, just, beam)
        if not moved.any() and not (beam.gathers and complete.any()):
            none = np.empty(0, np.int64)
            return self, none, none, none
        groups = np.arange(len(final))[:, None]
        # No two candidates of a request get the same number: every step has another length.
        serials = np.array(lengths)[:, None] * beam.ranked + place
        merged = np.concatenate([self.scores, np.where(just, final, final + NEVER)], axis=1)
        best_scores, best = top(merged, width)
        filled = np.concatenate([self.filled, just], axis=1)[groups, best]
        numbered = np.concatenate([self.serials, serials], axis=1)[groups, best]
        taken = np.zeros(merged.shape, dtype=bool)
        taken[groups, best] = True
        search, rank = (complete if beam.gathers else taken[:, width:] & just).nonzero()
        after = replace(
            self,
            scores=np.where(moved, best_scores, self.scores),
            filled=np.where(moved, filled, self.filled),
            serials=np.where(moved, numbered, self.serials),
        )
        return after, search, rank, serials[search, rank]

    def _moved(self, final: np.ndarray, just: np.ndarray, beam: Beam) -> np.ndarray:
        """Return (N, 1) which banks change when all candidates are ranked with what the banks hold.

        A candidate that did not end ranks far below. It takes an empty place where its score is
        above 0, and may reorder equals, so that later ties are broken differently.
        """
        equal = (self.scores[:, 1:] == self.scores[:, :-1]) & self.filled[:, 1:]
        moved: np.ndarray = just.any(axis=1) | (final > 0).any(axis=1) | equal.any(axis=1)
        return moved[:, None] & self._takes(beam)

    def settle(
        self, best: np.ndarray, ended: np.ndarray, beam: Beam
    ) -> tuple[BeamBank, np.ndarray]:
        """Close the banks whose result no later hypothesis can change, and return (N,) which.

        `best`: (N, 1) the best final scores that are still possible.

        Source: transformers' `_check_early_stop_heuristic`, with its assumption that the best
        running beam keeps its score at the current length (at the longest under "never").
        """
        worst = np.where(self.filled, self.scores.min(axis=1, keepdims=True), NEVER)
        going = self._takes(beam) & (best > worst).any(axis=1, keepdims=True)
        over: np.ndarray = ~going | ended.all(axis=1, keepdims=True)
        same = np.array_equal(over, ~self.open)
        return self if same else replace(self, open=~over), over[:, 0]


def divisors(values: list[float]) -> np.ndarray:
    """Return the values as (N, 1) float32."""
    return np.array(values, dtype=np.float32)[:, None]


def top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (G, count) the best of (G, n) scores and their places; equals as torch takes them."""
    order = (-scores).argsort(axis=1, kind="stable")
    ranked = scores[np.arange(len(scores))[:, None], order]
    if not (ranked[:, 1:] < ranked[:, :-1]).all():
        best = torch.topk(torch.from_numpy(scores), count)
        return best.values.numpy(), best.indices.numpy()
    return ranked[:, :count], order[:, :count]
