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

from everystep.draws import SeededDraws
from everystep.engine import (
    Contrast,
    Corpus,
    CorpusLookup,
    DoLa,
    DraftModel,
    Guidance,
    OtherDraftModel,
    PromptLookup,
    Reuse,
    Tokenizers,
)
from everystep.processors.allowed import AllowedSequencesLogitsProcessor
from everystep.processors.guidance import HammingDiversityLogitsProcessor
from everystep.processors.repetition import (
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import (
    Beam,
    BestOf,
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
from everystep.testing.hash_model import HashExecutor, HesitantExecutor
from everystep.testing.tokenizer import Letters
from everystep.types import Prompt, Request
from everystep.types.request import Drafter, Strategy
from tests.judges.dice import EMBED_DIM, Dice
from tests.judges.random_prompts import furnished, random_prompt, related
from tests.judges.rules import Discourage, Forbid, FrequencyPenalty, Murmur
from tests.judges.wide_requests import readable, widened

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_SCHEDULES = ("constant", "heuristic")


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
        "draft_models": isinstance(request.drafter, DraftModel | OtherDraftModel),
        "other_words": isinstance(request.drafter, OtherDraftModel),
        "corpora": isinstance(request.drafter, CorpusLookup),
        "trees": request.drafts > 1,
        "contrastive": isinstance(strategy, Contrastive),
        "contrast": isinstance(request.readout, Contrast),
        "best_of": isinstance(strategy, BestOf),
        "n_best": isinstance(strategy, Beam) and strategy.keeps > 0,
        "allowed": any(
            isinstance(one, AllowedSequencesLogitsProcessor) for one in request.processors
        ),
        "guidance": bool(request.companions),
        "hooks": bool(request.hooks),
    }
    return [name for name, holds in named.items() if holds]


def random_mix(seed: int) -> Mix:
    """One to six requests with a schedule; the same ones for the same seed."""
    draw = Dice(np.random.default_rng([seed, 0]))
    function = HashFunction(draw.between(12, 40), EMBED_DIM)
    count = draw.between(1, 6)
    streams = (Dice(np.random.default_rng([seed, stream])) for stream in (1, 2, 4))
    further, hooking, wider = streams
    requests = tuple(
        _hooked(
            widened(_request(f"request {i}", function, draw, further), function, wider), hooking
        )
        for i in range(count)
    )
    requests = tuple(_hooked(request, hooking) for request in requests)
    streams = (Dice(np.random.default_rng([seed, stream])) for stream in (5, 6, 7))
    changing, reading, branching = streams
    requests = tuple(_contrasted(request, reading) for request in requests)
    requests = tuple(related(requests, Dice(np.random.default_rng([seed, 3]))))
    requests = tuple(
        _drafted_otherwise(readable(request), function, changing) for request in requests
    )
    requests = tuple(
        _several_drafts(request, function.vocab_size, branching) for request in requests
    )
    return Mix(seed, function.vocab_size, requests, random_schedule(requests, draw))


def mixes() -> SearchStrategy[Mix]:
    """The mixes as a hypothesis strategy."""
    from hypothesis import strategies

    return strategies.integers(0, 2**32 - 1).map(random_mix)


# --- requests -------------------------------------------------------------------------------------


def _request(name: str, function: HashFunction, draw: Dice, further: Dice) -> Request:
    prompt = furnished(random_prompt(function, draw), function, further)
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
    mixed = isinstance(request.readout, Contrast)
    if mixed or not request.strategy.reads.alone or draw.chance(0.88):
        return request
    return replace(request, readout=DoLa(layers, request.readout))


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


def _drafted_otherwise(request: Request, function: HashFunction, draw: Dice) -> Request:
    """The request, perhaps with a drafter that makes other drafts, or of other lengths."""
    drafter, size = request.drafter, function.vocab_size
    if isinstance(drafter, DraftModel) and draw.chance(0.4):
        shift = draw.between(-2, 3)
        tokenizers = Tokenizers(
            Letters(size), Letters(size + 2, shift), draw.between(1, 4), draw.between(1, 4)
        )
        opened = partial(HashExecutor, size + 2, EMBED_DIM)
        by = draw.one_of("tokens", "text")
        drafter = OtherDraftModel(opened, tokenizers, by, drafter.tokens)
    elif isinstance(drafter, PromptLookup) and draw.chance(0.2):
        corpus = Corpus([draw.ids(size, draw.between(2, 30)).tolist() for _ in range(2)])
        prompt = drafter if draw.chance(0.5) else None
        drafter = CorpusLookup(corpus, drafter.tokens, draw.between(2, 6), prompt=prompt)
    if isinstance(drafter, DraftModel | OtherDraftModel):
        threshold = draw.one_of(0.0, 0.0, 0.2)
        drafter = replace(drafter, schedule=draw.one_of(*_SCHEDULES), threshold=threshold)
    return replace(request, drafter=drafter)


def _several_drafts(request: Request, size: int, draw: Dice) -> Request:
    """The request, perhaps with several drafts of each sequence, of so many ids."""
    drafter = request.drafter
    if not isinstance(drafter, PromptLookup | CorpusLookup | DraftModel) or draw.chance(0.5):
        return request
    if isinstance(drafter, DraftModel) or draw.chance(0.3):
        opened = partial(HesitantExecutor, size, EMBED_DIM)
        drafter = DraftModel(opened, drafter.tokens, drafter.schedule)
    return replace(request, drafter=replace(drafter, alternatives=draw.between(1, 3)))


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
    return int(request.strategy.width) * (1 + len(request.companions)) * request.drafts
