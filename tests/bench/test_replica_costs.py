"""What is measured of ways to a replica, and of votes: each request, event and vote once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.reading import ROOT


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "bench")
    yield import_module


def test_a_way_that_computes_nothing_tells_as_many_events_as_are_asked_for(parts: Any) -> None:
    ways, generator = parts("parts.replica_ways"), parts("parts.load")
    costs: ModuleType = parts("replicas")
    with ways.on_uvicorn() as target:
        found = generator.load(target, [["hello"] * 3, ["hello"]], 7)
        assert [len(one.events) for one in found.answers] == [7] * 4
        shown = costs.way_costs(target, 3, 2, 5)
    assert 0 < shown.least_request_ms <= shown.request_ms
    assert shown.event_us > 0 and shown.gap_ms <= shown.gap_p99_ms


def test_everystep_is_asked_with_a_model_of_compiled_kernels(parts: Any, tmp_path: Path) -> None:
    ways, generator = parts("parts.replica_ways"), parts("parts.load")
    with ways.on_serve(ways.model_folder(tmp_path)) as target:
        found = generator.load(target, [["hello"], ["hello"]], 9)
    assert [len(one.events) for one in found.answers] == [9] * 2


def test_two_processes_vote_as_often_as_they_are_told_to(parts: Any) -> None:
    found = parts("parts.votes").vote_costs(20)
    assert all(one > 0 for one in astuple(found))
    assert found.least_vote <= found.vote and found.least_sum <= found.sum
