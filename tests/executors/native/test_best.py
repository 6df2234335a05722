"""The best logits of a row and their totals, as the native executor's head tells them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from everystep.executors.native import NativeExecutor
from everystep.models import Model
from everystep.types import MOST_BEST, Scores, StepOutput, Verb, Work
from tests.executors.members import members
from tests.executors.models import PLAIN, narrow_model, random_model

pytestmark = pytest.mark.native
WIDE = 1_300  # two whole groups of columns and a part of one
COUNTS = np.array([3, 1, 5, 2, 4])


@cache
def wide_model(width: int = WIDE) -> Model:
    return random_model(replace(PLAIN, vocab_size=width, tied=False), dtype=torch.float32)


def told(best: list[int], model: Model, threads: int = 2) -> StepOutput:
    """Five feeds of random ids, each of which wants so many of the best at every position."""
    rows = np.arange(len(COUNTS))
    tokens = np.random.default_rng(3).integers(0, 40, COUNTS.sum())
    verbs = tuple(Verb("allocate", row) for row in rows.tolist())
    work = Work(verbs, rows, 0 * rows, COUNTS, COUNTS, tokens)
    with members(threads):
        return NativeExecutor(model).run(replace(work, best=np.array(best), totals=True))


def assert_best_of(logits: torch.Tensor, best: Scores, count: int) -> None:
    values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert np.array_equal(best.values[:, :count], values[:, :count].numpy(), equal_nan=True)
    assert best.tokens is not None and torch.equal(best.tokens[:, :count], tokens[:, :count])
    assert best.rest is not None
    assert np.array_equal(best.rest[:, 0], values[:, count - 1].numpy(), equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 8, MOST_BEST])
@pytest.mark.parametrize("width", [40, WIDE])
def test_the_best_are_those_of_the_whole_row(width: int, count: int, threads: int) -> None:
    model = wide_model(width)
    whole = told([0] * len(COUNTS), model)
    found = told([count] * len(COUNTS), model, threads)
    assert found.best is not None and found.best.totals is not None and whole.totals is not None
    assert found.logits.shape == (0, width)
    assert_best_of(whole.logits, found.best, min(count, width))
    assert torch.equal(found.best.totals, whole.totals)
    torch.testing.assert_close(whole.totals, torch.logsumexp(whole.logits, dim=-1))


def test_feeds_that_want_the_best_stand_beside_feeds_that_want_all() -> None:
    model, wants = wide_model(), [0, 2, 0, 9, 1]
    whole, found = told([0] * len(COUNTS), model), told(wants, model)
    most = np.repeat(wants, COUNTS)
    assert found.best is not None
    assert torch.equal(found.logits, whole.logits[torch.from_numpy(most == 0)])
    rows = np.flatnonzero(most)
    for r, row in enumerate(rows.tolist()):
        one = found.best.select(torch.tensor([r]), int(most[row]))
        assert_best_of(whole.logits[row : row + 1], one, int(most[row]))


@pytest.mark.parametrize("name", ["plain", "softcap", "int8", "int4"])
def test_rows_that_are_read_after_all_have_the_bits_of_their_step(name: str) -> None:
    model = read_model(name)
    whole, found = told([0] * len(COUNTS), model), told([3] * len(COUNTS), model, threads=3)
    assert found.best is not None
    assert torch.equal(found.best.whole().values, whole.logits)
    some = torch.tensor([14, 0, 3])
    assert torch.equal(found.best.select(some, 1).whole().values, whole.logits[some])


def read_model(name: str) -> Model:
    if name.startswith("int"):
        return narrow_model("llama", name)
    cap = 2.0 if name == "softcap" else None
    spec = replace(PLAIN, vocab_size=WIDE, tied=False, final_softcap=cap)
    return random_model(spec, dtype=torch.float32)


def test_of_equals_the_lower_id_comes_first() -> None:
    model = tied_model()
    with torch.no_grad():
        model.network.head.weight[650:] = model.network.head.weight[:650].clone()
    best = told([4] * len(COUNTS), model).best
    assert best is not None and best.tokens is not None
    pairs = best.tokens.reshape(-1, 2)
    assert (pairs[:, 1] - pairs[:, 0] == 650).all()


def test_a_nan_is_the_highest_as_in_argmax() -> None:
    model = tied_model()
    with torch.no_grad():
        model.network.head.weight[[45, 900, 1_299]] = torch.nan
    best, whole = told([4] * len(COUNTS), model).best, told([0] * len(COUNTS), model).logits
    assert best is not None and best.tokens is not None
    assert (best.tokens[:, :3] == torch.tensor([45, 900, 1_299])).all()
    assert best.values[:, :3].isnan().all()
    assert torch.equal(best.tokens[:, 0], whole.argmax(-1))


def tied_model() -> Model:
    """One whose head is a table that can be written to; its ids below 40 are fed."""
    return random_model(replace(PLAIN, vocab_size=WIDE, tied=True), dtype=torch.float32)
