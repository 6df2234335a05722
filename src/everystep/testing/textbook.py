"""Every way to choose, written as in its textbook: no cache, no batch, no engine.

Each loop asks the hash function for the logits of a whole prefix, anew for every token. It shares
with the engine only what a request is made of: draws, processors, stops and hooks. What was found
out about some tokens is remembered, since hooks look back at all earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from everystep.draws import fork_lineage
from everystep.engine import DoLa, Guidance
from everystep.errors import UnsupportedError
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.strategies.classic import BankedBeams
from everystep.testing.hash_function import HashFunction
from everystep.testing.reading import keys_of, logits, logits_after, masked, states_of
from everystep.testing.textbook_dola import dola
from everystep.types import (
    AfterStep,
    BeforeStep,
    Next,
    PromptMoment,
    Request,
    Rows,
    Scores,
    Sequence,
    TokenTable,
)
from everystep.types.batch import Places
from everystep.types.candidates import Candidates
from everystep.types.hooks import UNCHANGED

_NEVER = -1.0e9

T = TypeVar("T")


@dataclass(frozen=True)
class Hypothesis:
    """One sequence of a result: its generated ids, its score (0 without scores), how it ended."""

    tokens: tuple[int, ...]
    score: float
    reason: str


@dataclass(frozen=True)
class Hummed:
    """What hooks know after some tokens."""

    memories: tuple[Any, ...]
    forced: tuple[int, ...] = ()
    stops: bool = False


def generate(request: Request, function: HashFunction) -> list[Hypothesis]:
    """The result of a request, in the order in which its strategy returns it."""
    return told(Prefix(request, function))


def told(prefix: Prefix) -> list[Hypothesis]:
    """The same of a prefix, which may ask another model than the hash function."""
    strategy = prefix.request.strategy
    if isinstance(strategy, Greedy):
        return [follow(prefix, lambda scores, _: int(scores.argmax()))]
    if isinstance(strategy, Sample):
        return [sample(prefix, index) for index in range(strategy.width)]
    if isinstance(strategy, Beam):
        return beam_search(prefix, strategy)
    if isinstance(strategy, Contrastive):
        return [contrastive(prefix, strategy)]
    if isinstance(strategy, BankedBeams):
        from everystep.testing.textbook_beams import banked_beams  # which needs this file

        return banked_beams(prefix, strategy)
    raise UnsupportedError("no textbook loop", got=type(strategy).__name__)


# --- what all loops ask ---------------------------------------------------------------------------


def remembered(ask: Callable[[Any, list[int]], T]) -> Callable[[Any, list[int]], T]:
    """A question to a prefix that is worked out once for the same tokens, which alone decide it."""

    @wraps(ask)
    def answer(prefix: Any, tokens: list[int]) -> T:
        place = (ask.__name__, *tokens)
        if place not in prefix.known:
            prefix.known[place] = ask(prefix, tokens)
        found: T = prefix.known[place]
        return found

    return answer


@dataclass(frozen=True)
class Prefix:
    """A request's prompt, asked about with different tokens after it.

    `known`: answers that were given, by question and tokens.
    """

    request: Request
    function: HashFunction
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    @remembered
    def scores(self, tokens: list[int]) -> Tensor:
        """(V,) processed scores of what may follow the tokens."""
        return self.scores_beside(tokens, None)

    def scores_beside(self, tokens: list[int], chosen: list[int] | None) -> Tensor:
        """The same, where these were chosen beside them just now."""
        forced = self.hummed(tokens).forced
        if forced:
            mixed = torch.full((self.function.vocab_size,), -torch.inf)
            mixed[forced[0]] = 0.0
            return mixed
        states, keys = self._read(tokens)
        mixed, readout = logits_after(self.function, states, keys), self.request.readout
        if isinstance(readout, DoLa):
            mixed, readout = dola(self.function, states[-1], mixed, readout.layers), readout.then
        if isinstance(readout, Guidance):
            other = logits(self.function, self.request.companions[0], tokens).log_softmax(-1)
            mixed = readout.scale * (mixed.log_softmax(-1) - other) + other
        if self.request.strategy.reads.scores == "log_probs":
            mixed = mixed.log_softmax(-1)
        for processor in self.request.processors:
            sequence, table = self._written(tokens)
            beside = None if chosen is None else np.array([chosen])
            rows = Rows(table, [sequence], np.array([sequence.visible]), beside)
            mixed = processor(rows, mixed[None])[0]
        return mixed

    def hidden(self, tokens: list[int]) -> Tensor:
        """(T, E) hidden state of every position."""
        states, _ = self._read(tokens)
        return self.function.hidden(np.array(states, np.uint64))

    def reason(self, tokens: list[int]) -> str | None:
        """Why the tokens end here, by the first stop that says so; None if they go on."""
        sequence, table = self._written(tokens[:-1])
        candidate = Candidates(table, [sequence], np.array(tokens[-1:]))
        for stop in self.request.stops:
            if stop(candidate)[0]:
                return stop.reason(candidate, 0).kind
        return "criteria" if self.hummed(tokens).stops else None

    def places(self, tokens: list[int], lineage: int) -> Places:
        """Where the choice after the tokens stands."""
        numbers = (self.request.draws.seed, lineage, self.request.prompt.length + len(tokens))
        seed, lineages, position = (np.array([number], np.uint64) for number in numbers)
        return Places(seed, lineages, position, slot=np.array([0]), slots=1)

    @remembered
    def hummed(self, tokens: list[int]) -> Hummed:
        """What the request's hooks know after the tokens, worked out from the first one on."""
        hooks, request = self.request.hooks, self.request
        if not hooks:
            return Hummed(())
        if not tokens:
            moment = PromptMoment(request, self._embed)
            return Hummed(tuple(hook.on_prompt(moment) for hook in hooks))
        before = self.hummed(tokens[:-1])
        sequence, table = self._written(tokens[:-1])
        seen = {"scores": lambda: self.scores(tokens[:-1])}
        seen["hidden"] = lambda: self.hidden(tokens[:-1])[-1]
        memories, forced, stops = [], before.forced[1:], False
        for hook, memory in zip(hooks, before.memories, strict=True):
            step = AfterStep(
                request, tokens[-1], sequence.length, memory, hook.reads,
                lambda name: seen[name](), table.data[sequence.line],
            )  # fmt: skip
            then = hook.after_step(step) or Next()
            memories.append(memory if then.memory is UNCHANGED else then.memory)
            forced = forced if then.force is None else tuple(then.force)
            stops = stops or then.stop is not False
        return Hummed(tuple(memories), forced, stops)

    @remembered
    def _read(self, tokens: list[int]) -> tuple[list[int], list[int]]:
        """The state after every position of the prompt and the tokens, and the keys of inputs."""
        fed = [self._fed(tokens[:count]) for count in range(len(tokens) + 1)]
        keys = [key for keys in fed for key in keys]
        return states_of(self.function, self.request.prompt, keys), keys

    @remembered
    def _fed(self, tokens: list[int]) -> list[int]:
        """The keys of what is fed when the tokens are chosen: the prompt, or the last of them."""
        request, prompt = self.request, self.request.prompt
        if tokens:
            start, keys = prompt.length + len(tokens) - 1, [self.function.token_key(tokens[-1])]
        else:
            start, keys = 0, keys_of(self.function, prompt, [])
        given: dict[str, Tensor] = {}
        for hook, memory in zip(request.hooks, self.hummed(tokens).memories, strict=True):
            sequence, table = self._written(tokens)
            line = table.data[sequence.line]
            step = BeforeStep(request, start, len(keys), memory, given, self._embed, line)
            given |= hook.before_step(step) or {}
        if "embeds" in given:
            keys = self.function.keys(given["embeds"])
        return [masked(self.function, prompt, place, key) for place, key in enumerate(keys, start)]

    def _embed(self, ids: Tensor) -> Tensor:
        return self.function.embed(ids.numpy())

    def _written(self, tokens: list[int]) -> tuple[Sequence, TokenTable]:
        """A sequence without memory or rows, and the table that its ids stand in."""
        request, table = self.request, TokenTable(1)
        ids = [] if request.prompt.ids is None else request.prompt.ids.tolist()
        line = table.open(np.array([request.pad_token] * request.pad_prefix + ids + tokens, int))
        return Sequence(request, line, request.prompt.length + len(tokens)), table


# --- the loops ------------------------------------------------------------------------------------


def follow(prefix: Prefix, choose: Callable[[Tensor, list[int]], int]) -> Hypothesis:
    """One token after the other, as `choose(scores, tokens)` says, until a stop."""
    tokens: list[int] = []
    while True:
        tokens.append(choose(prefix.scores(tokens), tokens))
        if reason := prefix.reason(tokens):
            return Hypothesis(tuple(tokens), 0.0, reason)


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
            ratings.append((1.0 - strategy.alpha) * probability - strategy.alpha * penalty)
        return int(likely.indices[int(np.argmax(ratings))])

    return follow(prefix, choose)


@dataclass
class Beams:
    """The state of one search: W running hypotheses and W slots for finished ones."""

    running: list[list[int]]
    scores: Tensor
    banked: Tensor
    bank: list[Hypothesis | None] = field(default_factory=list)
    improvable: bool = True
    over: bool = False

    @classmethod
    def opening(cls, width: int) -> Beams:
        """Equal siblings, of which only the first counts."""
        never = torch.full((width,), _NEVER)
        scores = torch.cat([torch.zeros(1), never[1:]])
        return cls([[] for _ in range(width)], scores, never, [None] * width)

    @property
    def filled(self) -> Tensor:
        """(W,) which slots hold a finished hypothesis."""
        return torch.tensor([slot is not None for slot in self.bank])


def beam_search(prefix: Prefix, strategy: Beam) -> list[Hypothesis]:
    """The `returns` best hypotheses. Source: the reference's `_beam_search`, for one prompt."""
    search = Beams.opening(strategy.width)
    while not search.over:
        _advance(prefix, strategy, search)
    finished = [slot for slot in search.bank if slot is not None]
    missing = Hypothesis((), _NEVER, "length")
    return (finished + [missing] * strategy.width)[: strategy.returns]


def _advance(prefix: Prefix, strategy: Beam, beams: Beams) -> None:
    """One step."""
    values, continued = _continuations(prefix, strategy, beams)
    reasons = [prefix.reason(tokens) for tokens in continued]
    ended = torch.tensor([reason is not None for reason in reasons])
    _store(strategy, beams, values, continued, reasons)
    going = values + ended.float() * _NEVER
    beams.scores, best = torch.topk(going, len(beams.running))
    beams.running = [continued[i] for i in best.tolist()]
    full = strategy.early_stopping is True and bool(beams.filled.all())
    if not _may_improve(strategy, beams) or bool(ended.all()) or full:
        beams.over = True


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

    Of equal scores that are no scores (`_NEVER`) the one wins that `topk` takes, as in the
    reference: hence the same layout, slots first and then all continuations.
    """
    final = values / (len(continued[0]) ** strategy.length_penalty)
    closed = strategy.early_stopping is True and bool(beams.filled.all())
    new: list[Hypothesis | None] = [None] * len(continued)
    if beams.improvable and not closed:
        for i in range(len(beams.running)):
            if reason := reasons[i]:
                new[i] = Hypothesis(tuple(continued[i]), float(final[i]), reason)
    absent = torch.tensor([hypothesis is None for hypothesis in new])
    merged = torch.cat([beams.banked, final + absent.float() * _NEVER])
    beams.banked, best = torch.topk(merged, len(beams.running))
    slots = [*beams.bank, *new]
    beams.bank = [slots[i] for i in best.tolist()]


def _may_improve(strategy: Beam, beams: Beams) -> bool:
    """Whether a running beam could still beat the worst slot, by the reference's estimate."""
    length = len(beams.running[0])
    if strategy.early_stopping == "never" and strategy.length_penalty > 0.0:
        length = strategy.max_new
    reachable = beams.scores[0] / (length**strategy.length_penalty)
    worst = torch.where(beams.filled, beams.banked.min(), _NEVER)
    beams.improvable = beams.improvable and bool((reachable > worst).any())
    return beams.improvable
