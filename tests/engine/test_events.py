"""What a stream tells of hypotheses that are settled late: each token once, the end on the last."""

from __future__ import annotations

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.mixes import random_mix

SIZE = 6


def beams(seed: int, width: int, returns: int) -> Request:
    """A search in which hypotheses end early, as every sixth token is an end."""
    ids = np.random.default_rng(seed).integers(0, SIZE, 4)
    strategy = Beam(width, returns, eos_count=1, max_new=12, length_penalty=0.0)
    stops = (EosToken((0,)), MaxLength(16))
    return Request(str(seed), Prompt(ids), strategy, SeededDraws(0), (), stops, max_length=16)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_beam_that_has_ended_has_an_event_per_token_and_no_more(width: int) -> None:
    early = 0
    for seed in range(40):
        run = Drive(Engine(HashExecutor(SIZE), Continuous()))
        run.submit(beams(seed, width, 1 + seed % width))
        ends: list[int] = []
        while run.engine.pending:
            run.step()
            ends.append(len(run.events))
        early += ends[0] > 0 or len(set(ends)) > 2
        for index, one in enumerate(run.results[str(seed)]):
            own = [event for event in run.events if event.index == index]
            assert [event.token for event in own] == [*one.tokens], (seed, index)
            assert [event.position for event in own] == [*range(len(own))]
            assert [event.finish is not None for event in own] == [*[False] * (len(own) - 1), True]
    assert early > 5  # tokens are told before the end where they are settled


@pytest.mark.parametrize("seed", [117, 120])
def test_a_result_that_was_known_before_the_search_ended(seed: int) -> None:
    """It had all its tokens told, and then an event without one, for its end."""
    mix = random_mix(seed)
    run = run_together(mix.requests, hash_executor(mix))
    empty = {
        (name, index)
        for name, found in run.results.items()
        for index, one in enumerate(found)
        if not one.tokens
    }
    assert all(one.token >= 0 or (one.request_id, one.index) in empty for one in run.events)
