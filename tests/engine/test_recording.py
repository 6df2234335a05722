"""Summaries of scores, beside torch's; the best of a row, with nan, ties and ruled out tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.engine.recording import Summary, best_of


def scores(size: int, seed: int, ruled_out: float) -> np.ndarray:
    dice = np.random.default_rng(seed)
    found = (dice.standard_normal(size) * 5).round(1).astype(np.float32)
    found[dice.random(size) < ruled_out] = -np.inf
    return found


@pytest.mark.parametrize("size", [1, 7, 320, 4000, 49_152, 50_001])
@pytest.mark.parametrize("ruled_out", [0.0, 0.5, 0.999])
def test_summaries_and_the_best_are_those_of_torch(size: int, ruled_out: float) -> None:
    row = scores(size, size, ruled_out)
    plain = torch.from_numpy(row).double()
    found, count = Summary.of(row), min(10, size)
    if found.possible:
        logs = plain.log_softmax(-1)
        own = logs[logs > -torch.inf]
        assert found.total == pytest.approx(float(plain.logsumexp(-1)), abs=1e-5)
        assert found.entropy == pytest.approx(float(-(own.exp() * own).sum()), abs=1e-4)
        token = int(plain.argmax())
        low, high = found.part(row, token)
        share = plain.softmax(-1)
        assert low == pytest.approx(float(share[:token].sum()), abs=1e-5)
        assert high - low == pytest.approx(float(share[token]), abs=1e-5)
    best = best_of(row, count)
    assert row[best].tolist() == plain.topk(count).values.tolist()
    assert len({*best.tolist()}) == count
    order = [(-row[id], id) for id in best.tolist()]
    assert order == sorted(order)


def test_rows_without_a_number() -> None:
    assert Summary.of(np.full(9, -np.inf, np.float32)).possible == 0
    assert np.isnan(Summary.of(np.array([np.nan, 1.0], np.float32)).entropy)
