"""Every way to choose, written as in its textbook: no cache, no batch, no engine.

Each loop asks the hash function for the logits of a whole prefix, anew for every token. It shares
with the engine only what a request is made of: draws, processors, stops and hooks. What was found
out about some tokens is remembered, since hooks look back at all earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.draws import fork_lineage
from everystep.errors import UnsupportedError
from everystep.strategies import Beam, BestOf, Contrastive, Greedy, Sample
from everystep.strategies.classic import BankedBeams
from everystep.testing.hash_function import HashFunction
from everystep.types import (
    Request,
    Scores,
)
from tests.judges.prefix import NEVER, is_found
from tests.judges.prefix import Hypothesis as Hypothesis
from tests.judges.prefix import Prefix as Prefix
from tests.judges.textbook_beams import banked_beams
from tests.judges.textbook_best import best_of


def generate(request: Request, function: HashFunction) -> list[Hypothesis]:
    """The result of a request, in the order in which its strategy returns it."""
    return told(Prefix(request, function))


def told(prefix: Prefix) -> list[Hypothesis]:
    """The same of a prefix, which may ask another model than the hash function."""
    strategy = prefix.request.strategy
    if isinstance(strategy, Greedy):
        return [follow(prefix, lambda scores, _: int(scores.argmax()))]
    if isinstance(strategy, Sample | BestOf):
        samples = ended([sample(prefix, index) for index in range(strategy.width)])
        return best_of(prefix, strategy, samples) if isinstance(strategy, BestOf) else samples
    if isinstance(strategy, Beam):
        return beam_search(prefix, strategy)
    if isinstance(strategy, Contrastive):
        return [contrastive(prefix, strategy)]
    if isinstance(strategy, BankedBeams):
        return banked_beams(prefix, strategy)
    raise UnsupportedError("no textbook loop", got=type(strategy).__name__)


# --- the loops ------------------------------------------------------------------------------------


def follow(prefix: Prefix, choose: Callable[[Tensor, list[int]], int]) -> Hypothesis:
    """One token after the other, as `choose(scores, tokens)` says, until a stop; an error where no
    token is left."""
    tokens: list[int] = []
    while True:
        scores = prefix.scores(tokens)
        if bool((scores == -torch.inf).all()):
            return Hypothesis(tuple(tokens), 0.0, "error")
        tokens.append(choose(scores, tokens))
        if reason := prefix.reason(tokens):
            return Hypothesis(tuple(tokens), 0.0, reason)


def ended(found: list[Hypothesis]) -> list[Hypothesis]:
    """The sequences of a request, all of which end where the first one fails; before the first
    token they are one."""
    last = min((len(one.tokens) for one in found if one.reason == "error"), default=None)
    if last is None:
        return found
    if last == 0:
        return [Hypothesis((), 0.0, "error")]
    return [
        Hypothesis(one.tokens[:last], 0.0, "error")
        if one.reason == "error" or len(one.tokens) > last
        else one
        for one in found
    ]


def sample(prefix: Prefix, index: int) -> Hypothesis:
    """Sequence `index` of a request: draws of its own lineage."""
    lineage = fork_lineage(0, 0, index) if index else 0

    def choose(scores: Tensor, tokens: list[int]) -> int:
        place = prefix.places(tokens, lineage)
        return int(prefix.request.draws.choose(Scores.of(scores[None]), place))

    return follow(prefix, choose)


def contrastive(prefix: Prefix, strategy: Contrastive) -> Hypothesis:
    """Of the `top_k` likeliest tokens the one whose hidden state is most unlike all earlier ones.

    Source: Su et al. 2022, equation 5.
    """

    def choose(scores: Tensor, tokens: list[int]) -> int:
        if forced := prefix.hummed(tokens).forced:
            return forced[0]
        likely = torch.topk(torch.softmax(scores, dim=-1), strategy.top_k)
        ratings = []
        for probability, token in zip(likely.values.tolist(), likely.indices.tolist(), strict=True):
            hidden = torch.nn.functional.normalize(prefix.hidden([*tokens, token]).double(), dim=-1)
            penalty = float((hidden[:-1] @ hidden[-1]).max())
            rating = (1.0 - strategy.alpha) * probability - strategy.alpha * penalty
            ratings.append(rating if probability else -np.inf)
        return int(likely.indices[int(np.argmax(ratings))])

    return follow(prefix, choose)


@dataclass
class Beams:
    """The state of one search: W running hypotheses and slots for finished ones."""

    running: list[list[int]]
    scores: Tensor
    banked: Tensor
    bank: list[Hypothesis | None] = field(default_factory=list)
    improvable: bool = True
    over: bool = False

    @classmethod
    def opening(cls, width: int, slots: int) -> Beams:
        """Equal siblings, of which only the first counts."""
        scores, never = torch.full((width,), NEVER), torch.full((slots,), NEVER)
        scores[0] = 0.0
        return cls([[] for _ in range(width)], scores, never, [None] * slots)

    @property
    def filled(self) -> Tensor:
        """(slots,) which slots hold a finished hypothesis."""
        return torch.tensor([slot is not None for slot in self.bank])


def beam_search(prefix: Prefix, strategy: Beam) -> list[Hypothesis]:
    """The `returns` best hypotheses. Source: transformers' `_beam_search`, for one prompt."""
    search = Beams.opening(strategy.width, strategy.slots)
    while not search.over:
        before = search.running
        if not _advance(prefix, strategy, search):
            return [Hypothesis(tuple(tokens), -torch.inf, "error") for tokens in before]
    finished = [slot for slot in search.bank if slot is not None]
    power = strategy.length_penalty
    finished = [one for one in finished if is_found(one.score * len(one.tokens) ** power)]
    missing = Hypothesis((), NEVER, "length")
    return (finished + [missing] * strategy.returns)[: strategy.returns]


def _advance(prefix: Prefix, strategy: Beam, beams: Beams) -> bool:
    """One step; False where nothing has ended and nothing is possible."""
    values, continued = _continuations(prefix, strategy, beams)
    if not beams.filled.any() and float(values.max()) == -torch.inf:
        return False
    reasons = [prefix.reason(tokens) for tokens in continued]
    ended = torch.tensor([reason is not None for reason in reasons])
    _store(strategy, beams, values, continued, reasons)
    going = values + ended.float() * NEVER
    beams.scores, best = torch.topk(going, len(beams.running))
    beams.running = [continued[i] for i in best.tolist()]
    full = strategy.early_stopping is True and bool(beams.filled.all())
    if not _may_improve(strategy, beams) or bool(ended.all()) or full:
        beams.over = True
    return True


def _continuations(prefix: Prefix, strategy: Beam, beams: Beams) -> tuple[Tensor, list[list[int]]]:
    """The best or the drawn ones among all tokens after all beams: values and sequences."""
    scores = torch.stack([prefix.scores(tokens) for tokens in beams.running])
    total = scores + beams.scores[:, None]
    flat, count = total.reshape(-1), max(2, 1 + strategy.eos_count) * len(beams.running)
    if strategy.sampled:
        draws, places = prefix.request.draws, prefix.places(beams.running[0], 0)
        probabilities = torch.softmax(flat[None], dim=-1)
        drawn = draws.choose_without_replacement(probabilities, places, count)[0]
    else:
        drawn = torch.topk(flat, count).indices
    pairs = [divmod(index, total.shape[1]) for index in drawn.tolist()]
    return flat[drawn], [[*beams.running[beam], token] for beam, token in pairs]


def _store(
    strategy: Beam,
    beams: Beams,
    values: Tensor,
    continued: list[list[int]],
    reasons: list[str | None],
) -> None:
    """Those of the W best continuations that ended compete for the slots.

    Of equal scores that are no scores (`NEVER`) the one wins that `topk` takes, as in
    transformers: hence the same layout, slots first and then all continuations.
    """
    final = values / (len(continued[0]) ** strategy.length_penalty)
    closed = strategy.early_stopping is True and bool(beams.filled.all())
    new: list[Hypothesis | None] = [None] * len(continued)
    if beams.improvable and not closed:
        for i in range(len(beams.running)):
            if reason := reasons[i]:
                new[i] = Hypothesis(tuple(continued[i]), float(final[i]), reason)
    absent = torch.tensor([hypothesis is None for hypothesis in new])
    merged = torch.cat([beams.banked, final + absent.float() * NEVER])
    beams.banked, best = torch.topk(merged, len(beams.bank))
    slots = [*beams.bank, *new]
    beams.bank = [slots[i] for i in best.tolist()]


def _may_improve(strategy: Beam, beams: Beams) -> bool:
    """Whether a running beam could still beat the worst slot, by transformers' estimate."""
    length = len(beams.running[0])
    if strategy.early_stopping == "never" and strategy.length_penalty > 0.0:
        length = strategy.max_new
    reachable = beams.scores[0] / (length**strategy.length_penalty)
    worst = torch.where(beams.filled, beams.banked.min(), NEVER)
    beams.improvable = beams.improvable and bool((reachable > worst).any())
    return beams.improvable
