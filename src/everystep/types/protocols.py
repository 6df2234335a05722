"""What a request's choices must be able to do: protocols, which a class need not import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from everystep.types.ends import Finished, FinishReason

if TYPE_CHECKING:
    from everystep.types import Children, Group, Sequence, TokenTable
    from everystep.types.batch import Batch, Places
    from everystep.types.candidates import Candidates
    from everystep.types.hooks import AfterStep, BeforeStep, Next, PromptMoment
    from everystep.types.scores import Scores


@dataclass(frozen=True, slots=True)
class Reads:
    """The parts of a step that a strategy reads.

    `scores`: processed logits, or processed log-probabilities. `best`: how many of the best scores
    of a row decide where no processor changes them, or 0 for all of them. `shortlists`: whether
    `pick` needs no token that processors left at -inf; then they may be shown the best of a row.
    `hidden`: whether it reads the last hidden states of every position, kept as `Batch.columns`.
    `alone`: whether each sequence chooses one token from its own row, whatever the others do; such
    a strategy can be given drafts, of which it learns nothing.
    """

    scores: Literal["logits", "log_probs"] = "logits"
    best: int = 0
    shortlists: bool = False
    hidden: bool = False
    alone: bool = False


Processor = Callable[[Any, Tensor], Tensor]
"""A function of (rows, scores), or of (ids, scores); must not change the scores (R, V) in place."""


class Strategy(Protocol):
    """A frozen value that reads scores and returns children; equal strategies choose together.

    It runs no loop, calls no model, touches no cache and writes nothing: a group's state travels in
    `Children`.
    """

    @property
    def width(self) -> int:
        """Sequences per request from the first choice on."""

    @property
    def returns(self) -> int:
        """Sequences in a request's result; while it streams, those of rank < returns."""

    @property
    def streams(self) -> bool:
        """True if chosen tokens may be shown at once; if not, it is a `DecidesLate`."""

    @property
    def reads(self) -> Reads:
        """The parts of a step that it reads."""

    @property
    def rounds(self) -> int:
        """The number of picks in a step; a later round sees what the earlier ones picked."""

    def pick(
        self, batch: Batch, scores: Scores, earlier: tuple[tuple[np.ndarray, ...], ...] = ()
    ) -> tuple[Tensor, ...]:
        """Reduce the scores of S rows to small tensors, all that `select` will get of them.

        Where lists do not decide, it reads whole rows.
        `earlier`: what the earlier rounds of this step picked, on the host.
        """

    def select(self, batch: Batch, picked: tuple[tuple[np.ndarray, ...], ...]) -> Children:
        """Return who continues whom, from what every round picked."""

    def finish(self, group: Group) -> list[Finished]:
        """Return the group's result, best first where there is an order."""


class DecidesLate(Strategy, Protocol):
    """A strategy whose tokens are settled late."""

    def rivals(self, group: Group) -> tuple[list[Sequence], list[Finished]]:
        """Return the hypotheses that the group's result can still come from."""


class InRounds(Strategy, Protocol):
    """A strategy with several rounds: in each of them other sequences choose."""

    def turn(
        self, batch: Batch, earlier: tuple[tuple[np.ndarray, ...], ...]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return (n,) the rows that choose next, and (n, m) tokens of the earlier rounds.

        The tokens were chosen beside each row; they are None in the first round. Processors see
        both.
        """


class Draws(Protocol):
    """Chooses tokens at random for rows that stand at given places."""

    @property
    def seed(self) -> int:
        """The value of `Places.seed` for the rows of a request with these draws."""

    @property
    def whole_rows(self) -> bool:
        """True if a choice also looks at tokens without a score."""

    def choose(self, scores: Scores, places: Places) -> Tensor:
        """Choose (R,) one token per row of R, drawn from their softmax; -1 where that is nan.

        Lists, with their ids in rising order, give the same as the rows that they stand for.
        """

    def choose_without_replacement(
        self, probabilities: Tensor, places: Places, count: int
    ) -> Tensor:
        """Choose (R, count) distinct indices per row of (R, n) probabilities, in order of the draw.

        They are -1 where a row holds nan.
        """

    def uniform(self, stream: str, places: Places, n: int = 1) -> Tensor:
        """Return (R, n) numbers in (0, 1) from a named stream."""

    def beside(self, stream: str) -> Draws:
        """Return draws of the same kind and seed whose choices depend on none of these."""


class Stop(Protocol):
    """A function of candidates; equal stops of different requests are called once."""

    def __call__(self, candidates: Candidates) -> np.ndarray:
        """Return (C,) bool: which candidates end."""

    def reason(self, candidates: Candidates, index: int) -> FinishReason:
        """Return why candidate `index`, for which the call said True, ends."""


class Readout(Protocol):
    """A rule that makes one row of the logits of a sequence, its companions and earlier layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers before which hidden states are read out too, with the head alone."""

    def mix(self, logits: Tensor, companions: list[Tensor], early: Tensor | None = None) -> Tensor:
        """Mix (R, V) logits of the sequences and of each companion -> (R, V).

        `early`: (n, R, V), those of the n layers.
        """


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
class Verification:
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


MATCHING = Verification()


class Asked(NamedTuple):
    """A draft that is wanted: of a sequence that has not ended, with one id or more, at `most` so
    many. Rank 0 is the likeliest; rank n the likeliest that begins with another id than those of
    all lower ranks."""

    sequence: Sequence
    most: int
    rank: int = 0


class Drafting(Protocol):
    """A drafter at work for one engine."""

    def propose(self, asked: list[Asked], table: TokenTable) -> list[Draft]:
        """Return the ids that may follow the sequence, for each that is asked for."""

    def restart(self) -> None:
        """Drop everything that it held for sequences; it is made again from the ids."""

    def held(self) -> int:
        """Return how many cache rows it holds."""


class Drafter(Protocol):
    """A frozen value that guesses how sequences go on; equal ones work together."""

    @property
    def tokens(self) -> int:
        """The number of ids in a draft, at first or at most."""

    @property
    def schedule(self) -> Schedule:
        """The way in which that number changes."""

    @property
    def alternatives(self) -> int:
        """The number of further drafts of a sequence, verified beside the first, at most."""

    def start(self, vocabulary: int) -> Drafting:
        """Start a drafter for an engine with so many ids, with storage of its own if it needs some.

        Raise RequestError if it cannot draft for them.
        """


class Hook(Protocol):
    """An object that looks at every step of a request and adds to it, under any strategy.

    Derive from it and override what is needed. All that a hook knows of a sequence is its memory,
    an immutable value; each method has to follow from what it is given, for it may be asked again.
    What it raises ends its request alone.

    `gives`: the names that `before_step` may give: "embeds", or inputs that the model declares.
    `reads`: what `after_step` looks at, of "scores", "logits" and "hidden".
    """

    gives: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    def on_prompt(self, moment: PromptMoment) -> Any:
        """Return the memory that a sequence begins with."""
        return None

    def before_step(self, step: BeforeStep) -> Mapping[str, Tensor] | None:
        """Return what the model reads at the positions of the step beside ids, by name, or instead.

        "embeds" and inputs per token: (count, ...), an entry per position; other inputs: one entry
        (...), for all of them. It takes the place of what the prompt gives.
        """
        return None

    def after_step(self, step: AfterStep) -> Next | None:
        """Return what follows from a token; None for nothing.

        It is asked about every token that the strategy may go on with, in a search also about some
        that are not taken.
        """
        return None
