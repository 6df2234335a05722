"""The simulated fleet of replicas: what it counts is what its plan says, at both sizes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from tests.reading import ROOT


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield import_module("replicas")


def test_a_ring_moves_the_sessions_of_what_went_and_no_others(fleet: ModuleType) -> None:
    whole, without = fleet.LivingRing(range(50)), fleet.LivingRing(range(50))
    without.remove(7)
    names = [f"session {number}" for number in range(4000)]
    before, after = ([ring.of(one) for one in names] for ring in (whole, without))
    assert {one for one, other in zip(before, after, strict=True) if one != other} == {7}
    without.add(7)
    assert [without.of(one) for one in names] == before and without.replicas == 50
    counts = [before.count(one) for one in range(50)]
    assert min(counts) > 0.4 * 80 and max(counts) < 1.9 * 80, "the load is shared"


@pytest.mark.parametrize(("replicas", "sessions"), [(100, 2000), (1000, 500)])
def test_a_fleet_is_as_its_plan_says(fleet: ModuleType, replicas: int, sessions: int) -> None:
    plan = fleet.FleetPlan(replicas, life_hours=4.0, sessions=sessions, turn_seconds=200.0)
    found = fleet.simulate(plan, seed=1)
    assert found == fleet.simulate(plan, seed=1)
    assert abs(found.deaths - replicas / 4) < 5 * (replicas / 4) ** 0.5
    assert found.repeated == pytest.approx(found.deaths * plan.at_work, rel=0.01)
    assert found.repeated_seconds == pytest.approx(found.repeated * 4.0, rel=0.15)
    assert found.given_up < 0.005 * found.repeated
    away = replicas * plan.cold_seconds / (4 * 3600)
    assert replicas - found.least < 4 + 3 * away
    # A death moves the sessions of one replica, and the next one takes as many from others.
    expected = 2 * found.deaths / replicas * sessions / found.turns
    assert found.moved / found.turns == pytest.approx(expected, rel=0.35)
    calm = fleet.simulate(fleet.FleetPlan(replicas, life_hours=1e9, sessions=50))
    assert (calm.deaths, calm.moved, calm.repeated) == (0, 0, 0)


def test_fronts_grow_with_what_is_asked_of_them(fleet: ModuleType) -> None:
    costs = fleet.measured(20)
    one, ten = (
        fleet.fronts_of(fleet.FleetPlan(count), costs, 25.0, 0.025) for count in (100, 1000)
    )
    assert ten == pytest.approx(10 * one) and one > 0
    assert fleet.figures_of(20, 0.1)["requests"] == 20 * 1.5 * 360
