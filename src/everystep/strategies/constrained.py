"""Constrained beam search: hypotheses that fulfil constraints, by banks of how much each has done.

Beside the likeliest continuations every beam offers the tokens that bring its constraints further.
What goes on is taken in turns from the banks, from the one that has done most downwards. Sources:
Post and Vilar 2018, Hu et al. 2019; transformers' `ConstrainedBeamSearchScorer` of 4.55. As
there, what the prompt fulfils counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.errors import RequestError
from everystep.processors.allowed import AllowedSequencesLogitsProcessor as AllowedSequences
from everystep.processors.grammars.mask import GrammarMask
from everystep.strategies.banks import Candidate
from everystep.strategies.base import Batch, strategy
from everystep.strategies.classic import BankedBeams
from everystep.strategies.constraint_list import ConstraintListState
from everystep.strategies.constraints import Constraint
from everystep.strategies.single import Picked
from everystep.types import Scores, Sequence

_KEY = "constraints"


class Progress:
    """A memory: how far the constraints are after the first ids of a sequence."""

    __slots__ = ("length", "state")

    def __init__(self, length: int, state: ConstraintListState) -> None:
        self.length, self.state = length, state

    def copy(self) -> Progress:
        """Return an equal one; a state is never changed."""
        return Progress(self.length, self.state)

    def rewind(self, length: int) -> None:
        """Forget what is known where that is further back."""
        if length < self.length:
            self.length = -1


class Offer(NamedTuple):
    """A candidate, and the state of its constraints."""

    one: Candidate
    state: ConstraintListState


@strategy("constrained_beam")
@dataclass(frozen=True)
class ConstrainedBeam(BankedBeams):
    """All `constraints` are fulfilled by what it returns, where that is possible."""

    constraints: tuple[Constraint, ...] = field(default=())

    def pick(self, batch: Batch, scores: Scores, earlier: Picked = ()) -> tuple[Tensor, ...]:
        """Pick as every search, and (S, n) summed scores of the tokens that bring beams further."""
        total = self.totals(batch, scores, 0)
        top = torch.topk(total.reshape(len(batch.groups), -1), self.ranked)
        wanted = [self._ahead(batch, row) for row in range(len(batch))]
        ids = np.zeros((len(wanted), max(map(len, wanted))), dtype=np.int64)
        for row, tokens in enumerate(wanted):
            ids[row, : len(tokens)] = tokens
        if ids.size and int(ids.max()) >= batch.vocabulary:
            raise RequestError(
                "a constraint asks for a token that is none",
                wanted=f"ids below {batch.vocabulary}",
                got=int(ids.max()),
                do="Check that tokenizer and model belong together",
            )
        return (*top, total.gather(1, on_device(total.device, ids)))

    def state(self, batch: Batch, row: int) -> ConstraintListState:
        """Return how far the constraints of a row are; to be copied before it is changed."""
        sequence = batch.sequences[row]
        known, end = sequence.memo.get(_KEY), sequence.visible
        if known is None or known.length < 0:
            known = Progress(sequence.request.pad_prefix, ConstraintListState(self.constraints))
        if known.length < end:
            state = known.state
            if not state.completed:
                state = state.copy()
                for token in batch.table.data[sequence.line, known.length : end].tolist():
                    state.add(token)
            known = Progress(end, state)
        sequence.memo[_KEY] = known
        return known.state

    def _ahead(self, batch: Batch, row: int) -> list[int]:
        """Return the tokens that bring a row further."""
        state = self.state(batch, row)
        return [] if state.completed else list(dict.fromkeys(state.advance() or ()))

    def _after(self, batch: Batch, one: Candidate) -> ConstraintListState:
        """Return the state once the candidate is chosen."""
        state = self.state(batch, one.parent)
        if not state.completed:
            state = state.copy()
            state.add(one.token)
        return state

    def may_end(self, batch: Batch, one: Candidate) -> bool:
        """Return whether all constraints are fulfilled."""
        return self._after(batch, one).completed

    def going(self, batch: Batch, ranked: list[Candidate], picked: Picked) -> list[Candidate]:
        """Return the best of all banks in turns, those that advance among them."""
        on = super().going(batch, ranked, picked)
        new = list(self._advancing(batch, on, picked[0][2]))
        if not new:
            return on
        offers = [*(Offer(one, self._after(batch, one)) for one in on), *new]
        banks = np.array([offer.state.get_bank() for offer in offers])
        scores = np.array([offer.one.score for offer in offers], dtype=np.float32)
        order = (-((banks * 100).astype(np.float32) + scores)).argsort(kind="stable")
        turns = _places_within(banks[order])
        chosen = order[turns.argsort(kind="stable")][: self.width]
        return [offers[place].one for place in chosen.tolist()]

    def _advancing(self, batch: Batch, on: list[Candidate], scores: np.ndarray) -> Iterator[Offer]:
        """Yield what brings beams further and is not among those that go on anyway.

        As in transformers, that may be a token that is ruled out; but where a grammar is followed,
        such beams would crowd out those that follow it.
        """
        first = on[0].parent // self.width * self.width
        processors = batch.sequences[first].request.processors
        follows = any(isinstance(one, GrammarMask | AllowedSequences) for one in processors)
        taken = {(_said(batch, one.parent), one.token) for one in on}
        found: list[Candidate] = []
        for row in range(first, first + self.width):
            said = _said(batch, row)
            for place, token in enumerate(self._ahead(batch, row)):
                if (said, token) not in taken:
                    taken.add((said, token))
                    found.append(Candidate(float(scores[row, place]), row, token, None))
        parents = np.array([one.parent for one in found], dtype=np.int64)
        reasons = batch.stops(parents, np.array([one.token for one in found], dtype=np.int64))
        for one, reason in zip(found, reasons, strict=True):
            one = one._replace(reason=reason)
            if not one.ended and not (follows and one.score == -math.inf):
                yield Offer(one, self._after(batch, one))

    def left(self, batch: Batch, going: list[Candidate]) -> list[Candidate]:
        """Return those that fulfil everything, and the others too where there are too few."""
        whole = [one for one in going if self.may_end(batch, one)]
        others = [one for one in going if one not in whole]
        return whole if len(whole) >= self.returns else [*whole, *others]


def _said(batch: Batch, row: int) -> bytes:
    """Return the ids of a row."""
    sequence: Sequence = batch.sequences[row]
    return bytes(batch.table.data[sequence.line, : sequence.visible].tobytes())


def _places_within(banks: np.ndarray) -> np.ndarray:
    """Return the place of each of (n,) sorted numbers among its equals."""
    starts = np.r_[0, np.flatnonzero(np.diff(banks)) + 1]
    places: np.ndarray = np.arange(len(banks)) - np.repeat(
        starts, np.diff(np.r_[starts, len(banks)])
    )
    return places
