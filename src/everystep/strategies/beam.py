"""Beam search and beam sampling: the best or the drawn continuations of all beams.

Scores accumulate in float32 and every ranking is a `topk` over the same layout as transformers',
so that ties are broken alike. Source: transformers' vectorised `_beam_search`. One difference:
there the batch ends together, here each request ends when its own result can no longer change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from everystep.strategies.base import Batch, Reads, strategy, undrawable
from everystep.strategies.beam_bank import BeamBank, RankedBeams, divisors, top
from everystep.strategies.beams import (
    NEVER,
    NOTHING,
    BeamSettings,
    accumulated,
    candidates_of,
    filled_up,
    horizon,
    paths,
)
from everystep.strategies.single import Picked
from everystep.types import Children, Finished, Group, Scores, Sequence


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
        """How many finished hypotheses are ranked."""
        return max(self.width, self.keeps)

    @cached_property
    def ranked(self) -> int:
        """How many candidates are looked at."""
        return candidates_of(self.width, self.eos_count)

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """(G, ranked) accumulated scores per request, and flat indices W * V."""
        enough = scores.values.shape[1] >= min(self.ranked, scores.vocabulary)
        if self.reads.best and scores.tokens is not None and scores.rest is not None and enough:
            return self._pick_listed(batch, scores.values.numpy(), scores.tokens.numpy())
        values = scores.whole().values
        running = accumulated(batch.sequences, batch.groups, self.width)
        total = values + torch.from_numpy(running).to(values)[:, None]
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
        """The same from the best of each beam; of equals the earlier beam's better one wins."""
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
        """What was picked, request by request."""
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
        """Candidates that end are banked, the best others go on."""
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
        """The best of what the banks hold, in their order, and of what was cut short."""
        slots: list[int] = group.state.serials.ravel().tolist() if group.state else []

        def place(done: Finished) -> tuple[float, int]:
            # Only what was cut short was never offered to the bank.
            return -done.score, self.width if done.serial < 0 else slots.index(done.serial)

        held = [done for done in group.done if done.serial < 0 or done.serial in slots]
        return sorted(held, key=place)[: self.slots]

    def widened(self, group: Group) -> BeamBank:
        """What this search, had it run from the start, would know of a group whose search of fewer
        `keeps` is over: live beams do not depend on what is kept, and the narrower one stopped
        first. Its hypotheses were gathered."""
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

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """The live beams that can still get among the `returns` best, and those finished."""
        best = self.best(group)[: self.returns]
        request = group.request
        processed = bool(request.processors)
        if len(best) < self.returns:
            # Bans may leave too few beams to end, as may forced tokens, readouts that leave likely
            # tokens only, and the length; then a result is empty.
            banned = processed or bool(request.hooks) or request.readout is not None
            scarce = banned or group.settled or self.returns > self.width
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
        """The `returns` best; an empty hypothesis where fewer have ended."""
        return filled_up(self.best(group)[: self.returns], self.returns)
