"""Drafts that are accepted by chance: what comes out is distributed as without them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from everystep.draws import SeededDraws, SharedDraws
from everystep.engine import DraftModel, Engine, Lockstep, PromptLookup
from everystep.processors.warpers import TemperatureLogitsWarper
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.types import DraftVerification, Prompt, Request
from everystep.types.draw_places import Draws
from everystep.types.request import Drafter
from tests.judges.dice import EMBED_DIM
from tests.judges.drive import Drive
from tests.judges.textbook import Prefix

VOCABULARY, NEW, END = 6, 3, 4
FUNCTION = HashFunction(VOCABULARY, EMBED_DIM)
OTHER = DraftModel(partial(HashExecutor, VOCABULARY, EMBED_DIM - 1), 2)
SAME = DraftModel(partial(HashExecutor, VOCABULARY, EMBED_DIM), 2)
IDS = np.array([1, 3, 1, 2, 1])
WARM = (TemperatureLogitsWarper(1.7),)


def request(draws: Draws, drafter: Drafter | None, name: str = "0") -> Request:
    return Request(
        name,
        Prompt(IDS),
        Sample(),
        draws,
        WARM,
        (EosToken((END,)), MaxLength(len(IDS) + NEW)),
        drafter=drafter,
        verification=DraftVerification(rejects=drafter is not None),
        max_length=len(IDS) + NEW,
    )


def chances() -> dict[tuple[int, ...], float]:
    """Every result, and how likely it is."""
    prefix = Prefix(request(SeededDraws(0), None), FUNCTION)
    found: dict[tuple[int, ...], float] = {}
    for tokens in product(range(VOCABULARY), repeat=NEW):
        chance, taken = 1.0, []
        for token in tokens:
            chance *= float(prefix.scores(taken).softmax(-1)[token])
            taken.append(token)
            if token == END:
                break
        found[tuple(taken)] = chance
    return found


def drawn(drafter: Drafter | None, count: int) -> tuple[Counter[tuple[int, ...]], float]:
    """How often each result came, and the share of drafted ids that were accepted."""
    going = Drive(Engine(HashExecutor(VOCABULARY, EMBED_DIM), Lockstep()))
    for number in range(count):
        going.submit(request(SeededDraws(1000 + number), drafter, str(number)))
    going.finish()
    groups = going.groups.values()
    counts = going.engine.counts
    share = counts.accepted / max(counts.drafted, 1)
    return Counter(tuple(done.tokens.tolist()) for g in groups for done in g.done), share


@pytest.mark.parametrize("drafter", [OTHER, SAME, PromptLookup(2)], ids=["other", "same", "lookup"])
def test_results_are_distributed_as_without_drafts(drafter: Drafter) -> None:
    count, expected = 3000, chances()
    assert sum(expected.values()) == pytest.approx(1)
    found, share = drawn(drafter, count)
    assert 0 < share <= 1 and (drafter != SAME or share > 0.9)
    often = {key: one for key, one in expected.items() if one * count >= 5}
    rest = count - sum(found[key] for key in often)
    terms = [(found[key] - one * count) ** 2 / (one * count) for key, one in often.items()]
    left = (1 - sum(often.values())) * count
    square = sum(terms) + (rest - left) ** 2 / max(left, 1)
    freedom = len(terms)
    assert square < freedom + 4 * (2 * freedom) ** 0.5  # four deviations


def test_more_is_accepted_by_chance_than_by_a_match() -> None:
    """A guess that is drawn is accepted with sum(min(p, q)), which no other rule exceeds."""
    _, by_chance = drawn(OTHER, 1500)
    going = Drive(Engine(HashExecutor(VOCABULARY, EMBED_DIM), Lockstep()))
    for number in range(1500):
        own = request(SeededDraws(1000 + number), OTHER, str(number))
        # The guesses are drawn by numbers of their own, as they are for rejection.
        going.submit(replace(own, verification=DraftVerification()))
    going.finish()
    matched = going.engine.counts.accepted / going.engine.counts.drafted
    assert by_chance > matched


def test_siblings_that_open_together_are_drawn_apart() -> None:
    going = Drive(Engine(HashExecutor(VOCABULARY, EMBED_DIM), Lockstep()))
    own = replace(request(SeededDraws(3), SAME), strategy=Sample(40))
    going.submit(own)
    going.finish()
    (group,) = going.groups.values()
    first = Counter(int(done.tokens[0]) for done in group.done)
    assert len(first) > 2


def test_draws_of_torch_are_accepted_by_chance_too() -> None:
    torch.manual_seed(0)
    going = Drive(Engine(HashExecutor(VOCABULARY, EMBED_DIM), Lockstep()))
    for number in range(400):
        going.submit(request(SharedDraws(), SAME, str(number)))
    going.finish()
    assert going.engine.counts.accepted > 0.9 * going.engine.counts.drafted
    (best, chance), *_ = sorted(chances().items(), key=lambda pair: -pair[1])
    found = Counter(tuple(g.done[0].tokens.tolist()) for g in going.groups.values())
    assert abs(found[best] / 400 - chance) < 4 * (chance / 400) ** 0.5


def test_a_mixture_is_verified_where_one_is_asked_for() -> None:
    """Greedy choices of the mixture, as long as there are drafts; then of the model alone."""
    prefix = Prefix(replace(request(SeededDraws(0), None), strategy=Greedy()), FUNCTION)
    theirs = HashExecutor(VOCABULARY, EMBED_DIM - 1)
    other = Prefix(
        replace(request(SeededDraws(0), None), strategy=Greedy()),
        HashFunction(VOCABULARY, EMBED_DIM - 1),
    )
    assert theirs.vocab_size == VOCABULARY
    weight = 0.3
    own = replace(
        request(SeededDraws(0), replace(OTHER, tokens=1)),
        strategy=Greedy(),
        verification=DraftVerification(weight=weight),
    )
    going = Drive(Engine(HashExecutor(VOCABULARY, EMBED_DIM), Lockstep()))
    going.submit(own)
    going.finish()
    (group,) = going.groups.values()
    taken: list[int] = []
    while len(taken) < NEW and END not in taken:
        room = NEW - len(taken) > 1
        p, q = prefix.scores(taken).softmax(-1), other.scores(taken).softmax(-1)
        mixed = weight * p + (1 - weight) * q if room else p
        taken.append(int(mixed.argmax()))
        if room and int(q.argmax()) == taken[-1] and taken[-1] != END:
            taken.append(int(prefix.scores(taken).argmax()))
    assert group.done[0].tokens.tolist() == taken
