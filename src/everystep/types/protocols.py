"""The choices of a request that know nothing of requests: processors, readouts, drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reads:
    """The parts of a step that a strategy reads.

    `scores`: processed logits, or processed log-probabilities. `best`: how many of the best scores
    of a row decide where no processor changes them, or 0 for all of them. `shortlists`: whether
    `pick` needs no token that processors left at -inf; then they may be shown the best of a row.
    `hidden`: whether it reads the last hidden states of every position, kept as `Batch.columns`.
    `alone`: whether each sequence chooses one token from its own row, whatever the others do; such
    a strategy can be given drafts, of which it learns nothing. `number`: whether one number in
    (0, 1), drawn as "choice", falls on a row's token where its shares lie side by side.
    """

    scores: Literal["logits", "log_probs"] = "logits"
    best: int = 0
    shortlists: bool = False
    hidden: bool = False
    alone: bool = False
    number: bool = False


Processor = Callable[[Any, Tensor], Tensor]
"""A function of (rows, scores), or of (ids, scores); must not change the scores (R, V) in place."""


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """The logits that models give for the tokens that may follow R rows.

    `logits`: (R, V) those of the sequences; `companions`: (R, V) those of each companion, and of
    another model. `early`: (n, R, V) those of the n layers that a readout names. `allowed`: (R, V)
    bool of what grammars let follow, None where that is everything: a rule that `narrows` finds
    the likely ones among these.
    """

    logits: Tensor
    companions: list[Tensor]
    early: Tensor | None = None
    allowed: Tensor | None = None


class Readout(Protocol):
    """A rule that makes one row of the logits of a sequence, its companions and earlier layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers before which hidden states are read out too, with the head alone."""

    @property
    def narrows(self) -> bool:
        """True if it leaves likely tokens only."""

    def mix(self, given: Predictions) -> Tensor:
        """Return (R, V) the mixture."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Ids (n,) that may follow a sequence; `scores` (n, V): what each was drawn from, as softmax
    reads them, None where nothing was drawn."""

    ids: np.ndarray
    scores: Tensor | None = None


Schedule = Literal["constant", "heuristic", "costs"]
"""The length of drafts: always so many ids; two more after a draft that was right, one fewer after
one that was not; or as many as pay, by what steps have cost and drafts have gained."""


@dataclass(frozen=True, slots=True)
class DraftVerification:
    """The way in which drafts are judged.

    By default an id counts if it is what the strategy chooses. With `rejects` it counts with the
    probability p / q, where it was drawn from q and the strategy draws from p, and the first that
    does not is drawn anew from what p has beyond q: equal in distribution. With `weight` below 1 a
    mixture, weight * p + (1 - weight) * q, stands in the place of p, which changes the results.
    Source: Leviathan et al. 2023, algorithm 1; for the mixture transformers'
    `assistant_ensemble_weight`.
    """

    rejects: bool = False
    weight: float = 1.0

    @property
    def reads(self) -> bool:
        """True if it reads what drafts were drawn from."""
        return self.rejects or self.weight < 1


MATCHING = DraftVerification()
