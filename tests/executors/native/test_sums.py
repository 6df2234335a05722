"""Sums of scores by the library are those of float64, and say where they are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from everystep.engine.recorded_scores import Summary
from everystep.executors.native import sums
from everystep.executors.native.sums import sum_up

pytestmark = pytest.mark.native


@pytest.mark.parametrize("size", [1, 15, 16, 17, 1023, 1024, 1025, 49_152])
def test_they_are_those_of_float64(size: int) -> None:
    row = (np.random.default_rng(size).standard_normal(size) * 6 - 90).astype(np.float32)
    found = sum_up(row)
    wide = row.astype(np.float64) - float(row.max())
    assert found is not None and found[:2] == (float(row.min()), float(row.max()))
    assert found[2] == pytest.approx(np.exp(wide).sum(), rel=1e-6)
    assert found[3] == pytest.approx((np.exp(wide) * wide).sum(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_what_is_no_number_is_summed_up_as_without_the_library(
    value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = np.linspace(-3, 3, 40, dtype=np.float32)
    row[place] = value
    found = sum_up(row)
    assert found is not None and not math.isfinite(found[3])
    own = Summary.of(row)
    monkeypatch.setattr("everystep.engine.recorded_scores.sum_up", lambda scores: None)
    assert repr(own) == repr(Summary.of(row))


def test_other_scores_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    row = np.ones(64, np.float32)
    for other in (row.astype(np.float64), row[::2], row[:0]):
        assert sum_up(other) is None
    monkeypatch.setattr(sums, "status", lambda: type("Status", (), {"instructions": None}))
    assert sum_up(row) is None
