"""All laws on thousands of random mixes, in blocks, each with its share of the coverage floors."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest

from everystep.testing.laws import FLOORS, Coverage, Laws
from everystep.testing.requests import Mix, mixes, random_mix

MIXES = 125
DEFAULT_BLOCKS = 16  # 2,000 mixes
ALL_BLOCKS = 160  # 20,000 mixes


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.slow] if block >= DEFAULT_BLOCKS else [])
        for block in range(ALL_BLOCKS)
    ],
)
def test_the_laws_hold(block: int, record_property: Callable[[str, object], None]) -> None:
    laws = Laws()
    for seed in range(block * MIXES, (block + 1) * MIXES):
        laws.check(random_mix(seed))
    record_property("coverage", vars(laws.coverage))
    assert laws.coverage.shortfalls(FLOORS) == {}


def test_a_shortfall_is_found() -> None:
    found = Coverage(mixes=1_000, beams=200, sampling=199).shortfalls(
        Coverage(mixes=2_000, beams=400, sampling=400)
    )
    assert found == {"sampling": (199, 200.0)}


def test_a_mix_follows_from_its_seed() -> None:
    assert repr(random_mix(5).schedule) == repr(random_mix(5).schedule)
    assert [r.strategy for r in random_mix(5).requests] == [
        r.strategy for r in random_mix(5).requests
    ]


@hypothesis.given(mixes())
@hypothesis.settings(max_examples=25)
def test_the_laws_hold_anywhere(mix: Mix) -> None:
    Laws().check(mix)
