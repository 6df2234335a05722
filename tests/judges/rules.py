"""Simple processors and a hook for random mixes: small enough to be right at a glance.

They exercise what the engine promises to processors: the pad prefix is visible, drafts are part of
the prefix that follows them, and what a processor remembers is forked and rewound with its
sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everystep.types import AfterStep, BeforeStep, Next, PromptMoment, Rows
from everystep.types.hooks import Hook


@dataclass(frozen=True)
class Discourage:
    """Ids that the prefix holds, pad prefix included, lose `amount` once."""

    amount: float

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids, result = rows.ids(), scores.clone()
        for r, length in enumerate(rows.lengths.tolist()):
            result[r, torch.unique(ids[r, :length])] -= self.amount
        return result


@dataclass(frozen=True)
class Forbid:
    """One id cannot follow a prefix whose length is a multiple of `every`."""

    token: int
    every: int

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        result = scores.clone()
        result[torch.from_numpy(rows.lengths % self.every == 0), self.token] = -torch.inf
        return result


@dataclass(frozen=True)
class Residue:
    """The answer or score of a sample: the sum of its ids modulo `base`; None for 0, if `skips`."""

    base: int
    skips: bool = False

    def __call__(self, ids: np.ndarray) -> int | None:
        found = int(ids.sum()) % self.base
        return None if self.skips and not found else found


@dataclass(slots=True)
class Tally:
    """The ids of a prefix; it grows with the prefix, and shrinks when that is taken back."""

    ids: list[int]

    def copy(self) -> Tally:
        return Tally(list(self.ids))

    def rewind(self, length: int) -> None:
        """As it was after `length` visible ids."""
        del self.ids[length:]


@dataclass(frozen=True)
class FrequencyPenalty:
    """Ids lose `amount` per occurrence; read once and remembered in `sequence.memo`."""

    amount: float

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        ids, result = rows.ids(), scores.clone()
        for r, sequence in enumerate(rows.sequences):
            tally = sequence.memo.setdefault("tally", Tally([]))
            tally.ids += ids[r, len(tally.ids) : int(rows.lengths[r])].tolist()
            for token, count in Counter(tally.ids).items():
                result[r, token] -= self.amount * count
        return result


@dataclass(frozen=True)
class Murmur(Hook):
    """A hook that changes what is read by what was said, and at times says what comes next.

    Its memory is a number that every token changes, by its score too where `scores` is set. Every
    `every`-th token's position reads another embedding. After a token whose number is a multiple
    of `forces` the next two are forced, of `stops` the sequence ends; 0: never.
    """

    every: int
    forces: int
    stops: int
    scored: bool = False
    gives: tuple[str, ...] = ("embeds",)
    reads: tuple[str, ...] = ("scores", "hidden")

    def on_prompt(self, moment: PromptMoment) -> int:
        return moment.request.prompt.length

    def before_step(self, step: BeforeStep) -> Mapping[str, Tensor] | None:
        if step.count == 1 and len(step.generated) % self.every:
            return None
        left = [step.request.max_length - place for place in step.positions]
        ahead = torch.tensor(left, device=step.embeds.device)
        return {"embeds": step.embeds + (ahead + step.memory % 7)[:, None] * 0.25}

    def after_step(self, step: AfterStep) -> Next | None:
        known = (step.memory * 31 + step.token) % 1009
        if self.scored:
            known += int(step.scores.argmax()) + int(step.hidden[0] > 0)
        if not self.scored and step.token % 2:
            known = step.memory  # what is not changed lets drafts be right
        force = (step.token, known % 3) if self.forces and known % self.forces == 0 else None
        return Next(known, force, "murmur" if self.stops and known % self.stops == 0 else False)
