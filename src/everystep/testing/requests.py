"""Random mixes of requests and schedules: what the laws are tried on.

A mix follows from its seed alone. Prompts repeat phrases so that n-gram drafts find something, the
vocabularies are small so that end tokens are met, and the schedules are tight so that prompts are
chunked, groups wait and rows are taken away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everystep.draws import SeededDraws
from everystep.engine import DoLa, DraftModel, Guidance, PromptLookup, Reuse
from everystep.processors.guidance import HammingDiversityLogitsProcessor
from everystep.processors.repetition import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import (
    Beam,
    ConstrainedBeam,
    Contrastive,
    DiverseBeam,
    Greedy,
    Sample,
)
from everystep.strategies.classic import BankedBeams
from everystep.strategies.constraints import (
    Constraint,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.testing.rules import Discourage, Forbid, FrequencyPenalty, Murmur
from everystep.types import Injected, Prompt, Request
from everystep.types.protocols import Drafter, Strategy

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

EMBED_DIM = 4


@dataclass(frozen=True)
class Schedule:
    """How a continuous run goes: what arrives when, and what gets in the way.

    `arrivals[i]`: the step before which request i is submitted. `cancels[i]`: the step before which
    it is cancelled, or None. `preempt_rate`: the chance per step that one running group loses its
    rows. `audits`: whether the audit looks after every step, or only at the end. `reuse`: which
    rows other requests may continue.
    """

    arrivals: tuple[int, ...]
    cancels: tuple[int | None, ...]
    token_budget: int
    max_rows: int
    max_positions: int | None
    preempt_rate: float
    audits: bool
    seed: int
    reuse: Reuse = field(default_factory=Reuse)


@dataclass(frozen=True)
class Mix:
    """Requests for one hash function, and a schedule for them."""

    seed: int
    vocab_size: int
    requests: tuple[Request, ...]
    schedule: Schedule


def kinds(request: Request) -> list[str]:
    """What a request exercises."""
    strategy = request.strategy
    sampled = isinstance(strategy, Sample) or (isinstance(strategy, Beam) and strategy.sampled)
    named = {
        "beams": isinstance(strategy, Beam | BankedBeams),
        "diverse": isinstance(strategy, DiverseBeam),
        "constrained": isinstance(strategy, ConstrainedBeam),
        "dola": isinstance(request.readout, DoLa),
        "sampling": sampled,
        "speculation": request.drafter is not None,
        "draft_models": isinstance(request.drafter, DraftModel),
        "contrastive": isinstance(strategy, Contrastive),
        "guidance": bool(request.companions),
        "hooks": bool(request.hooks),
    }
    return [name for name, holds in named.items() if holds]


def random_mix(seed: int) -> Mix:
    """One to six requests with a schedule; the same ones for the same seed."""
    draw = Dice(np.random.default_rng([seed, 0]))
    function = HashFunction(draw.between(12, 40), EMBED_DIM)
    count = draw.between(1, 6)
    further, hooking = (Dice(np.random.default_rng([seed, stream])) for stream in (1, 2))
    requests = tuple(
        _hooked(_request(f"request {i}", function, draw, further), hooking) for i in range(count)
    )
    reading = Dice(np.random.default_rng([seed, 4]))
    requests = tuple(_contrasted(request, reading) for request in requests)
    requests = _related(requests, Dice(np.random.default_rng([seed, 3])))
    return Mix(seed, function.vocab_size, requests, random_schedule(requests, draw))


def mixes() -> SearchStrategy[Mix]:
    """The mixes as a hypothesis strategy."""
    from hypothesis import strategies

    return strategies.integers(0, 2**32 - 1).map(random_mix)


@dataclass(frozen=True)
class Dice:
    """Named throws of one generator."""

    rng: np.random.Generator

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def one_of(self, *choices: Any) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def ids(self, vocab_size: int, count: int) -> np.ndarray:
        """(count,) ids; mostly a phrase over and over."""
        ids = self.rng.integers(0, vocab_size, count)
        if count and self.chance(0.7):
            phrase = ids[: self.between(2, 5)]
            ids = np.tile(phrase, -(-count // len(phrase)))[:count]
        return ids.astype(np.int64)


# --- requests -------------------------------------------------------------------------------------


def _request(name: str, function: HashFunction, draw: Dice, further: Dice) -> Request:
    prompt = _furnished(_prompt(function, draw), function, further)
    ends = tuple(draw.ids(function.vocab_size, draw.between(0, 3)).tolist())
    pad_prefix = draw.between(1, 4) if draw.chance(0.3) else 0
    max_new = draw.between(1, 12)
    strategy = _strategy(draw, len(set(ends)), max_new, function.vocab_size)
    request = Request(
        request_id=name,
        prompt=prompt,
        strategy=strategy,
        draws=SeededDraws(draw.between(0, 2**31)),
        processors=_processors(function.vocab_size, draw, strategy),
        max_length=prompt.length + max_new,
        pad_prefix=pad_prefix,
    )
    if strategy.reads.alone and draw.chance(0.55):
        request = replace(request, drafter=_drafter(function, draw))
    limit = MaxLength(request.prompt_visible + max_new)
    request = replace(request, stops=(EosToken(ends), limit) if ends else (limit,))
    if draw.chance(0.1) and not isinstance(strategy, Contrastive):
        companion = Prompt(ids=draw.ids(function.vocab_size, draw.between(1, 8)))
        scale = draw.one_of(0.5, 1.5, 3.0)
        request = replace(request, companions=(companion,), readout=Guidance(scale))
    return request


def _hooked(request: Request, draw: Dice) -> Request:
    if draw.chance(0.85):
        return request
    numbers = (draw.between(1, 3), draw.one_of(0, 0, 3, 5), draw.one_of(0, 0, 7))
    # Of equal beams of several searches the textbook remembers one.
    first = Murmur(*numbers, scored=draw.chance(0.4) and request.strategy.rounds == 1)
    hooks = (first, Murmur(draw.between(1, 2), 0, 0)) if draw.chance(0.3) else (first,)
    return replace(request, hooks=hooks)


def _contrasted(request: Request, draw: Dice) -> Request:
    """The request, perhaps with what earlier layers say."""
    layers = draw.one_of((0,), (0, 3), (4, 1, 2))
    if not request.strategy.reads.alone or draw.chance(0.88):
        return request
    return replace(request, readout=DoLa(layers, request.readout))


def _prompt(function: HashFunction, draw: Dice) -> Prompt:
    length = draw.between(1, 20)
    ids: np.ndarray | None = draw.ids(function.vocab_size, length)
    embeds = positions = encoder = None
    if draw.chance(0.15):
        embeds = torch.from_numpy(draw.rng.standard_normal((length, EMBED_DIM)).astype(np.float32))
        ids = draw.one_of(None, ids)
    if draw.chance(0.15):
        shape = draw.one_of((length,), (3, length))
        positions = torch.from_numpy(draw.rng.integers(0, 30, shape))
    if draw.chance(0.1):
        size = (draw.between(1, 5), EMBED_DIM)
        encoder = torch.from_numpy(draw.rng.standard_normal(size).astype(np.float32))
    return Prompt(ids, embeds, positions, encoder)


def _related(requests: tuple[Request, ...], draw: Dice) -> tuple[Request, ...]:
    """The requests, of which most begin as an earlier one does; their salts are few."""
    made: list[Request] = []
    for request in requests:
        own = request.prompt
        alike = [one for one in made if (one.prompt.embeds is None) == (own.embeds is None)]
        shared = [one for one in alike if not (one.hooks or _reads_more(one.prompt))]
        if alike and draw.chance(0.85):
            other = draw.one_of(*(shared or alike)).prompt
            request = replace(request, prompt=_begun(own, other, draw))
        made.append(replace(request, salt=draw.one_of(*[None] * 5, "other")))
    return tuple(made)


def _reads_more(prompt: Prompt) -> bool:
    """Whether no other request may share what it begins with."""
    return prompt.encoder is not None or prompt.mask is not None


def _begun(own: Prompt, other: Prompt, draw: Dice) -> Prompt:
    """The prompt, in its length, which begins with the ids or embeddings of the other, and mostly
    with all that its positions are given."""
    count = min(own.length, other.length, draw.one_of(20, draw.between(1, 20)))
    embeds, ids = own.embeds, own.ids
    if embeds is not None and other.embeds is not None:
        embeds = torch.cat([other.embeds[:count], embeds[count:]])
    elif ids is not None and other.ids is not None:
        ids = np.concatenate([other.ids[:count], ids[count:]])
    prompt = replace(own, ids=ids, embeds=embeds)
    if draw.chance(0.15):
        return prompt
    return replace(
        prompt,
        positions=_places_begun(own, other.positions, count),
        injected=_features_begun(own, other.injected, count),
    )


def _places_begun(own: Prompt, theirs: Tensor | None, count: int) -> Tensor | None:
    """Position ids, of which the first `count` are theirs; none where they have none."""
    if theirs is None:
        return None
    shape, ours = theirs.shape[:-1], own.positions
    if ours is None or ours.shape[:-1] != shape:
        ours = torch.arange(own.length).expand(*shape, -1)
    return torch.cat([theirs[..., :count], ours[..., count:]], dim=-1)


def _features_begun(own: Prompt, theirs: Injected | None, count: int) -> Injected | None:
    """Features, theirs at the first `count` positions; none where they have none."""
    if theirs is None:
        return None
    parts = [(theirs, theirs.positions < count)]
    if own.injected is not None:
        parts.append((own.injected, own.injected.positions >= count))
    return Injected(
        np.concatenate([one.positions[here] for one, here in parts]),
        torch.cat([one.embeds[torch.from_numpy(here)] for one, here in parts]),
    )


def _furnished(prompt: Prompt, function: HashFunction, draw: Dice) -> Prompt:
    """The prompt, perhaps with features among its ids, ids of its own beside embeddings, position
    ids beyond its end, and a mask."""
    length = prompt.length
    if prompt.embeds is None and draw.chance(0.15):
        places = np.flatnonzero(draw.rng.random(length) < 0.5)
        embeds = draw.rng.standard_normal((len(places), EMBED_DIM)).astype(np.float32)
        prompt = replace(prompt, injected=Injected(places, torch.from_numpy(embeds)))
    elif prompt.embeds is not None and draw.chance(0.4):
        ids = draw.ids(function.vocab_size, draw.between(1, 2 * length))
        prompt = replace(prompt, ids=ids)
    if prompt.positions is not None and draw.chance(0.3):
        more = torch.from_numpy(draw.rng.integers(0, 40, (*prompt.positions.shape[:-1], 3)))
        prompt = replace(prompt, positions=torch.cat([prompt.positions, more], dim=-1))
    if draw.chance(0.12):
        shape = draw.one_of((length, length), (2, length, length))
        seen = torch.from_numpy(draw.rng.random(shape) < 0.7) | torch.eye(length, dtype=torch.bool)
        prompt = replace(prompt, mask=seen.tril())
    return prompt


def _strategy(draw: Dice, eos_count: int, max_new: int, vocabulary: int) -> Any:
    makers: list[tuple[int, Callable[[], Any]]] = [
        (4, Greedy),
        (7, lambda: Sample(draw.between(1, 4))),
        (3, lambda: _beam(draw, eos_count, max_new, vocabulary)),
        (1, lambda: Contrastive(draw.between(2, 4), draw.one_of(0.1, 0.6))),
    ]
    weights = np.array([weight for weight, _ in makers])
    return makers[int(draw.rng.choice(len(makers), p=weights / weights.sum()))][1]()


def _beam(draw: Dice, eos_count: int, max_new: int, vocabulary: int) -> Beam | BankedBeams:
    width = draw.between(2, 4)
    groups = draw.one_of(2, 4) if width == 4 and draw.chance(0.8) else 1
    search = (
        width,
        draw.between(1, width),
        draw.one_of(1.0, 0.0, -0.5, 2.0),
        draw.one_of(False, True, "never"),
        eos_count,
        max_new,
    )
    if groups > 1:
        return DiverseBeam(*search, groups=groups)
    beam = Beam(*search, sampled=draw.chance(0.4))
    words = Dice(np.random.default_rng(draw.between(0, 2**31)))
    return beam if words.chance(0.6) else ConstrainedBeam(*search, _words(words, vocabulary))


def _words(draw: Dice, vocabulary: int) -> tuple[Constraint, ...]:
    """One to three constraints, some of several words."""
    found: list[Constraint] = []
    for _ in range(draw.between(1, 3)):
        if draw.chance(0.6):
            found.append(PhrasalConstraint(draw.ids(vocabulary, draw.between(1, 3)).tolist()))
            continue
        firsts = dict.fromkeys(draw.ids(vocabulary, 3).tolist())
        words = [[one, *draw.ids(vocabulary, draw.between(0, 2)).tolist()] for one in firsts]
        found.append(DisjunctiveConstraint(words))
    return tuple(found)


def _drafter(function: HashFunction, draw: Dice) -> Drafter:
    if draw.chance(0.2):
        dim = draw.one_of(EMBED_DIM, EMBED_DIM - 1)  # the very same function, or another
        opened = partial(HashExecutor, function.vocab_size, dim)
        return DraftModel(opened, tokens=draw.between(1, 4))
    return PromptLookup(tokens=draw.between(1, 6), max_ngram=draw.between(1, 3))


def _processors(vocab_size: int, draw: Dice, strategy: Strategy) -> tuple[Any, ...]:
    token, every = draw.between(0, vocab_size - 1), draw.between(1, 3)
    known = (  # in the canonical order, own ones before those that cut the distribution
        (0.15, RepetitionPenaltyLogitsProcessor(draw.one_of(1.3, 0.8))),
        (0.1, NoRepeatNGramLogitsProcessor(draw.between(2, 3))),
        (0.2, FrequencyPenalty(draw.one_of(0.5, 1.25))),
        (0.15, Discourage(draw.one_of(0.75, -0.5))),
        (0.15, Forbid(token, every)),
        (0.2, TemperatureLogitsWarper(draw.one_of(0.7, 1.5))),
        (0.15, TopKLogitsWarper(draw.between(6, 10))),
        (0.1, TopPLogitsWarper(draw.one_of(0.8, 0.95))),
    )
    chosen = tuple(processor for probability, processor in known if draw.chance(probability))
    if strategy.rounds == 1:
        return chosen
    return (HammingDiversityLogitsProcessor(draw.one_of(0.5, 2.0), 4, 2), *chosen)


# --- schedules ------------------------------------------------------------------------------------


def random_schedule(requests: tuple[Request, ...], draw: Dice) -> Schedule:
    """A tight one, under which each of the requests can run."""
    widest = max(_rows(request) for request in requests)
    longest = max(request.max_length * _rows(request) for request in requests)
    return Schedule(
        arrivals=tuple(draw.between(0, 15) for _ in requests),
        cancels=tuple(draw.between(0, 25) if draw.chance(0.1) else None for _ in requests),
        token_budget=widest + draw.one_of(0, 1, 3, 8, 30),
        max_rows=widest + draw.one_of(0, 1, 3, 10),
        max_positions=draw.one_of(None, None, longest, 2 * longest),
        preempt_rate=draw.one_of(0.0, 0.1, 0.3),
        audits=draw.chance(0.5),
        seed=draw.between(0, 2**31),
        reuse=Reuse(kept=draw.one_of(0, 30, 80), least=draw.one_of(1, 1, 3)),
    )


def _rows(request: Request) -> int:
    return int(request.strategy.width) * (1 + len(request.companions))
