"""The laws hold for the samplers that draw or remember: alone, scheduled, drafted, in chunks.

Their textbooks are in tests/processors; a loop without memory cannot be one for them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everystep.engine import Engine, Lockstep
from everystep.executors.base import Executor
from everystep.processors.bias import LogitBias
from everystep.processors.repetition import (
    Dry,
    NoRepeatNGramLogitsProcessor,
    OccurrencePenalty,
    RepetitionPenaltyLogitsProcessor,
)
from everystep.processors.samplers import DynamicTemperature, Mirostat, TopNSigma, Xtc
from everystep.processors.synthid import SynthIDTextWatermarkLogitsProcessor
from everystep.strategies import Beam
from everystep.types import COLUMNS, Group, Request
from tests.judges.dice import Dice
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.laws import Laws
from tests.judges.mixes import Mix, random_mix


def without_textbook(mix: Mix, max_rows: int | None) -> Executor:
    return hash_executor(mix, max_rows)


def sampled_otherwise(mix: Mix) -> Mix:
    """The mix, its processors replaced by those of this page."""
    draw = Dice(np.random.default_rng([mix.seed, 1]))
    return replace(mix, requests=tuple(_otherwise(one, draw) for one in mix.requests))


def _otherwise(request: Request, draw: Dice) -> Request:
    keep = 4 if isinstance(request.strategy, Beam) else 1
    known = (
        LogitBias(((draw.between(0, 11), draw.one_of(1.5, -2.0)),)),
        OccurrencePenalty(draw.one_of(0.5, -0.5), draw.one_of(0.25, 1.0)),
        Dry(draw.one_of(0.5, 1.0), draw.one_of(1.0, 1.75), draw.between(1, 2)),
        DynamicTemperature(1.0, draw.one_of(0.3, 0.8)),
        TopNSigma(draw.one_of(1.5, 2.5)),
        Xtc(draw.one_of(0.3, 0.8), 0.01, keep),
        Mirostat(draw.one_of(2.0, 3.0), draw.one_of(0.1, 1.0), keep),
    )
    chosen = tuple(one for one in known if draw.chance(0.5))
    return replace(request, processors=chosen)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (25, 50, 75))]
)
def test_the_laws_hold(first: int) -> None:
    laws = Laws(without_textbook)
    for seed in range(first, first + 25):
        laws.check(sampled_otherwise(random_mix(seed)))
    met = ("sampling", "speculation", "preemptions_in_decode", "forks")
    assert all(laws.coverage[name] for name in met)


def test_what_is_a_cache_of_a_prefix_can_be_dropped_at_any_time() -> None:
    dropped = 0
    for seed in range(40):
        mix = sampled_otherwise(random_mix(seed))
        requests = [_remembering(one) for one in mix.requests]
        expected = run_together(requests, hash_executor(mix)).results
        run = Drive(Engine(hash_executor(mix), Lockstep()))
        for request in requests:
            run.submit(request)
        while run.engine.pending:
            run.step()
            # Without hidden states positions are fed again, in a step of their own.
            kept = () if run.engine.counts.steps % 3 == 0 else (COLUMNS,)
            dropped += sum(_drop(group, kept) for group in run.engine.scheduler.groups)
        assert run.results == expected
    assert dropped > 1_000


def _remembering(request: Request) -> Request:
    """The request with processors that remember its prefix before those that it has."""
    known = RepetitionPenaltyLogitsProcessor(1.3), NoRepeatNGramLogitsProcessor(3), _MARKED
    return replace(request, processors=(*known, *request.processors))


_MARKED = SynthIDTextWatermarkLogitsProcessor(3, [5, 9, 2], 2**10, 3, 8)


def _drop(group: Group, spared: tuple[str, ...]) -> int:
    """Drops what can be made again from ids, but for `spared`; how many there were."""
    caches = 0
    for sequence in group.live:
        for one in sequence.memo.values():
            if hasattr(one, "release"):
                one.release()
        kept = {
            key: one
            for key, one in sequence.memo.items()
            if key in spared or not hasattr(one, "copy")
        }
        caches += len(sequence.memo) - len(kept)
        sequence.memo = kept
    return caches
