"""All laws on thousands of random mixes, in blocks, each with its share of the coverage floors."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest

from tests.judges.laws import Laws, shortfalls
from tests.judges.mixes import Mix, mixes, random_mix

BLOCKS = [range(75)]
MORE_BLOCKS = [
    *(range(75, 125), range(125, 250), range(250, 500)),
    *(range(first, first + 500) for first in range(500, 20_000, 500)),
]


@pytest.mark.parametrize(
    "seeds",
    [*BLOCKS, *(pytest.param(block, marks=pytest.mark.slow) for block in MORE_BLOCKS)],
    ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}",
)
def test_the_laws_hold(seeds: range, record_property: Callable[[str, object], None]) -> None:
    laws = Laws()
    for seed in seeds:
        laws.check(random_mix(seed))
    record_property("coverage", dict(laws.coverage))
    assert shortfalls(laws.coverage) == {}


# Bans that leave no token beside DoLa, at the first token too; forced tokens that leave one beam.
@pytest.mark.parametrize("seed", [2318, 2804, 5406, 9314, 16071])
def test_the_laws_hold_where_exhaustive_runs_found_them_broken(seed: int) -> None:
    Laws().check(random_mix(seed))


def test_a_shortfall_is_found() -> None:
    found = {"mixes": 1_000, "beams": 200, "sampling": 199}
    floors = {"mixes": 2_000, "beams": 400, "sampling": 400}
    assert shortfalls(found, floors) == {"sampling": (199, 200.0)}


def test_a_mix_follows_from_its_seed() -> None:
    assert repr(random_mix(5).schedule) == repr(random_mix(5).schedule)
    assert [r.strategy for r in random_mix(5).requests] == [
        r.strategy for r in random_mix(5).requests
    ]


@hypothesis.given(mixes())
@hypothesis.settings(max_examples=25)
def test_the_laws_hold_anywhere(mix: Mix) -> None:
    Laws().check(mix)
