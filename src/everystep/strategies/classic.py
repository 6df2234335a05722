"""Beam searches that bank what ends and go on with what does not, candidate by candidate.

So transformers searched until 4.55, where diverse and constrained beams were left as they were:
each search has a bank of finished hypotheses, is closed as soon as no better one is to be expected,
and adds what still runs when the length is reached. Sources: its `BeamSearchScorer` and
`BeamHypotheses`. What ends a hypothesis is any stop, not an end token alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.strategies.banks import Candidate, Offspring, SearchBank
from everystep.strategies.base import Batch, Reads
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
from everystep.types import Children, Finished, Group, Scores, Sequence
from everystep.types.stored import fits


@dataclass(frozen=True)
class BankedBeams(BeamSettings):
    """The common base of searches whose beams are banked when they end."""

    streams: ClassVar[bool] = False
    reads: ClassVar[Reads] = Reads("log_probs")

    @property
    def rounds(self) -> int:
        """One search after another."""
        return 1

    @cached_property
    def beams(self) -> int:
        """The number of beams of a search."""
        return self.width // self.rounds

    @cached_property
    def ranked(self) -> int:
        """The number of candidates of a search that are looked at."""
        return candidates_of(self.beams, self.eos_count)

    def totals(self, batch: Batch, scores: Scores, search: int) -> Tensor:
        """Return (G * beams, V) accumulated scores of one search per request, in float32."""
        rows = self.rows(batch, search)
        sequences = [batch.sequences[r] for r in rows.tolist()]
        running = accumulated(sequences, batch.groups, self.beams)
        values = scores.whole().values[torch.from_numpy(rows)]
        return values + on_device(values.device, running, values.dtype)[:, None]

    def rows(self, batch: Batch, search: int) -> np.ndarray:
        """Return (G * beams,) the rows of one search per request."""
        return (self._firsts(batch, search) + np.arange(self.beams)).ravel()

    def _firsts(self, batch: Batch, search: int) -> np.ndarray:
        """Return (G, 1) the first of these rows."""
        return np.arange(len(batch.groups))[:, None] * self.width + search * self.beams

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Pick (G, ranked) accumulated scores of a search per request, and indices beams * V."""
        total = self.totals(batch, scores, len(earlier))
        return tuple(torch.topk(total.reshape(len(batch.groups), -1), self.ranked))

    def candidates(self, batch: Batch, picked: Picked, search: int) -> list[list[Candidate]]:
        """Return per request what one search ranked, best first."""
        scores, flat = picked[search][:2]
        parents = (flat // batch.vocabulary + self._firsts(batch, search)).ravel()
        tokens = (flat % batch.vocabulary).ravel()
        columns = scores.ravel().tolist(), parents.tolist(), tokens.tolist()
        found = list(map(Candidate, *columns, batch.stops(parents, tokens)))
        return [found[n : n + self.ranked] for n in range(0, len(found), self.ranked)]

    def going(self, batch: Batch, ranked: list[Candidate], picked: Picked) -> list[Candidate]:
        """Return the candidates that go on, of a search that is not closed."""
        on = [one for one in ranked if not one.ended][: self.beams]
        # Stops of other kinds may leave too few; what goes on beyond its end is never a result.
        beyond = [one._replace(score=one.score + NEVER) for one in ranked if one.ended]
        return [*on, *beyond][: self.beams]

    def may_end(self, batch: Batch, one: Candidate) -> bool:
        """Return whether what ends with this candidate is a result."""
        return True

    def left(self, batch: Batch, going: list[Candidate]) -> list[Candidate]:
        """Return which of those that run when the search is cut are results."""
        return going

    def at_rest(self, batch: Batch, g: int, search: int) -> list[Candidate]:
        """Return how a closed search goes on beside others: its first beam and the pad token."""
        first, pad = g * self.width + search * self.beams, batch.groups[g].request.pad_token
        return [Candidate(0.0, first, pad, None)] * self.beams

    def select(self, batch: Batch, picked: Picked) -> Children:
        """Bank candidates that end, and let the best others go on; all searches at once.

        A search of which nothing may go on is over with what it has.
        """
        found = [self.candidates(batch, picked, search) for search in range(self.rounds)]
        born = Offspring()
        states: list[tuple[SearchBank, ...]] = []
        over: list[int] = []
        for g, group in enumerate(batch.groups):
            if self._is_stuck(group, [ranked[g] for ranked in found]):
                born.lose(g * self.width, self.width)
                states.append(self.banks(group))
                continue
            after: list[SearchBank] = []
            going: list[Candidate] = []
            cut = any(one.cut for ranked in found for one in ranked[g])
            for search, bank in enumerate(self.banks(group)):
                if bank.closed:
                    after.append(bank)
                    going += self.at_rest(batch, g, search)
                    continue
                on, ranked = self.going(batch, found[search][g], picked), found[search][g]
                now = self._banked(batch, born, bank, ranked, search)
                if cut and not now.closed:
                    now = self._cut(batch, born, now, on, search)
                elif not now.closed and not any(is_found(one.score) for one in on):
                    spent = [one for one in ranked if one.ended and not self.may_end(batch, one)]
                    now = self._cut(batch, born, now, spent, search)
                after.append(now)
                going += on
            ended = cut or all(bank.closed for bank in after)
            if ended:
                over.append(g)
            for place, one in enumerate(going if not ended or group.request.linger else ()):
                born.add(one, one.score, index=place)
            states.append(tuple(after))
        return self._children(batch, born, states, over)

    def _is_stuck(self, group: Group, found: list[list[Candidate]]) -> bool:
        """Return whether open searches found nan, or nothing but -inf before anything ended."""
        pairs = zip(self.banks(group), found, strict=True)
        scores = [one.score for bank, ranked in pairs if not bank.closed for one in ranked]
        ended = any(bank.scores for bank in self.banks(group))
        return any(map(math.isnan, scores)) or (not ended and max(scores, default=0.0) == -math.inf)

    def _banked(
        self, batch: Batch, born: Offspring, bank: SearchBank, ranked: list[Candidate], search: int
    ) -> SearchBank:
        """Return the bank with what ended of the first candidates, and closed if that is enough."""
        length = batch.sequences[ranked[0].parent].generated + 1
        for place, one in enumerate(ranked[: self.beams]):
            if one.ended and self.may_end(batch, one):
                bank = self._offer(batch, born, bank, one, search, place)
        attainable = ranked[0].score / horizon(self, length) ** self.length_penalty
        return bank.after(-math.inf if self.early_stopping is True else attainable, self.beams)

    def _cut(
        self, batch: Batch, born: Offspring, bank: SearchBank, on: list[Candidate], search: int
    ) -> SearchBank:
        """Return the bank with what still runs when the length or the time is over."""
        for place, one in enumerate(self.left(batch, on)):
            bank = self._offer(batch, born, bank, one, search, self.ranked + place)
        return SearchBank(bank.scores, bank.serials, True)

    def _offer(
        self,
        batch: Batch,
        born: Offspring,
        bank: SearchBank,
        one: Candidate,
        search: int,
        place: int,
    ) -> SearchBank:
        """Return the bank after one more hypothesis, which is a child that ends if it is taken."""
        length = batch.sequences[one.parent].generated + 1
        final = one.score / length**self.length_penalty
        # No two of a request get the same number: every step has another length.
        serial = (length * self.rounds + search) * (self.ranked + self.width) + place
        after = bank.with_one(final, serial, self.beams)
        if after is not bank:
            born.add(one, final, serial=serial)
        return after

    def _children(
        self, batch: Batch, born: Offspring, states: list[tuple[SearchBank, ...]], over: list[int]
    ) -> Children:
        return Children(
            np.array(born.parents, dtype=np.int64),
            np.array(born.tokens, dtype=np.int64).reshape(-1, 1),
            np.ones(len(born.parents), dtype=np.int64),
            np.array(born.scores),
            born.finish,
            memo=paths(batch, self.width, born.parents),
            index=np.array(born.index, dtype=np.int64),
            serial=np.array(born.serial, dtype=np.int64),
            settled=tuple(over),
            states=states,
            held=[frozenset(n for bank in banks for n in bank.serials) for banks in states],
        )

    def knows(self, state: object) -> bool:
        """Return whether one of its groups may have these banks, or none before anything ended."""
        return state is None or (
            fits(state, tuple[SearchBank, ...])
            and len(cast(tuple[SearchBank, ...], state)) == self.rounds
            and all(len(one.scores) == len(one.serials) for one in cast(Any, state))
        )

    def banks(self, group: Group) -> tuple[SearchBank, ...]:
        """Return the bank of each search of a request."""
        return group.state or (SearchBank(),) * self.rounds

    def best(self, group: Group) -> list[Finished]:
        """Return what has ended, best first; of equals the last of the last search comes first."""
        places = [serial for bank in self.banks(group) for serial in bank.serials]

        def rank(done: Finished) -> tuple[float, int]:
            # What was cut short was never offered to a bank.
            return done.score, places.index(done.serial) if done.serial >= 0 else -1

        held = [done for done in group.done if done.serial < 0 or done.serial in places]
        return sorted(filter(self.came_to, held), key=rank, reverse=True)

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """Return all live beams of searches that are not closed, and the best of what has ended."""
        best, banks, request = self.best(group)[: self.returns], self.banks(group), group.request
        if len(best) < self.returns:
            # Where a search comes to fewer than are asked for, a result is empty.
            bans = request.processors or request.hooks or request.readout is not None
            scarce = bool(bans) or group.settled or self.returns > 1
            best = [*best, *([NOTHING] if scarce else [])]
        if group.settled:
            return [], best
        return [s for s in group.live if not banks[s.index // self.beams].closed], best

    def finish(self, group: Group) -> list[Finished]:
        """Return the `returns` best; an empty hypothesis where fewer have ended."""
        return filled_up(self.best(group)[: self.returns], self.returns)
