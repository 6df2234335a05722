"""What all beam searches share, however they bank what has ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from everystep.errors import RequestError
from everystep.strategies.base import Batch
from everystep.types import Finished, FinishReason, Group, Sequence
from everystep.types.stored import Chain, remembered

NEVER = -1.0e9
_PATH = remembered("beams", Annotated[Chain, int])
# A length of 2^31 to this power is still a number.
_MOST_PENALTY = 32
NOTHING = Finished(np.empty(0, np.int64), NEVER, FinishReason("length"), 0, 0, {})


@dataclass(frozen=True)
class BeamSettings:
    """The settings of every beam search.

    `width`: its beams, of all groups together. `returns`: how many hypotheses are the result.
    `eos_count`: how many end tokens the request has. `max_new`: the most tokens that a hypothesis
    can have (for `early_stopping="never"`).
    """

    width: int
    returns: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    eos_count: int = 1
    max_new: int = 2**31

    def __post_init__(self) -> None:
        """Raise RequestError for a length penalty that no score can be divided by."""
        if not abs(self.length_penalty) <= _MOST_PENALTY:
            raise RequestError(
                "length_penalty is an exponent that lengths cannot be raised to",
                wanted=f"-{_MOST_PENALTY} to {_MOST_PENALTY}",
                got=self.length_penalty,
                do="Use a number near 1; 0 leaves scores as they are",
            )

    def came_to(self, done: Finished) -> bool:
        """Return whether a hypothesis is one of the search's own.

        Of equal siblings, which open a search, the others are none, and what follows a token that
        may not follow is none either.
        """
        return is_found(done.score * max(len(done.tokens), 1) ** self.length_penalty)


def is_found(score: float) -> bool:
    """Return whether a sum of scores is that of a hypothesis that there is."""
    return not score <= NEVER / 2


def candidates_of(beams: int, eos_count: int) -> int:
    """Return how many candidates are looked at, so that all `beams` can go on.

    These are (1 + eos_count), at least two, for each.
    """
    return max(2, 1 + eos_count) * beams


def horizon(settings: BeamSettings, length: int) -> int:
    """Return the length at which what has `length` tokens now is judged."""
    late = settings.early_stopping == "never" and settings.length_penalty > 0.0
    return settings.max_new if late else length


def accumulated(sequences: list[Sequence], groups: list[Group], beams: int) -> np.ndarray:
    """Return (S,) float32 scores of `beams` sequences of each group.

    Of equal siblings, which open a search, only the first counts.
    """
    scores = np.array([sequence.score for sequence in sequences], dtype=np.float32)
    for g, group in enumerate(groups):
        if not group.opened:
            scores[g * beams + 1 : (g + 1) * beams] = NEVER
    return scores


def paths(batch: Batch, width: int, parents: list[int]) -> list[dict[str, object] | None]:
    """Return what each child remembers: its beams in the call, one after another."""
    found: list[dict[str, object] | None] = []
    for parent in parents:
        beam = batch.groups[parent // width].rank * width + parent % width
        found.append({_PATH: Chain(beam, batch.sequences[parent].memo.get(_PATH))})
    return found


def filled_up(best: list[Finished], returns: int) -> list[Finished]:
    """Return `returns` results; empty hypotheses where fewer have ended."""
    return best + [NOTHING] * (returns - len(best))
