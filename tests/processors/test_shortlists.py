"""A shortlist of wide rows is what the processors leave of the rows themselves, draws included."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep as es
from everystep.draws import Places, SeededDraws
from everystep.processors.best import beyond_mass
from everystep.processors.pipeline import apply
from everystep.types import Prompt, Request, Rows, Scores, Sequence, TokenTable
from tests.processors.making import applied

ROWS = 5
WIDTHS = (4097, 5000, 8192)
CHAINS = (
    (es.TopKLogitsWarper(50),),
    (es.TemperatureLogitsWarper(0.7), es.TopKLogitsWarper(50), es.TopPLogitsWarper(0.95)),
    (
        es.TemperatureLogitsWarper((0.5, 1.0, 2.0, 100.0, 0.01)),
        es.TopKLogitsWarper((1, 2, 50, 3, 9)),
    ),
    (es.TopKLogitsWarper(30), es.MinPLogitsWarper(0.05), es.TemperatureLogitsWarper(1.3)),
    (es.TemperatureLogitsWarper(1.3), es.TopPLogitsWarper((0.1, 0.5, 0.9, 0.0, 1.0))),
    (es.TopPLogitsWarper(0.9, min_tokens_to_keep=3), es.MinPLogitsWarper(0.2)),
    (es.TemperatureLogitsWarper(0.8), es.MinPLogitsWarper(0.1)),
    (
        es.ForcedEOSTokenLogitsProcessor(3, [9, 4, 9_000, 9]),
        es.TemperatureLogitsWarper(0.8),
        es.TopKLogitsWarper(1),
        es.LogitNormalization(),
    ),
)
KINDS = ("spread", "flat", "ties", "few", "none", "nan", "huge")


def drawn(kind: str, width: int) -> Tensor:
    """(5, width) scores; what is special stands in the first row alone."""
    generator = torch.Generator().manual_seed(width)
    scores = torch.randn(ROWS, width, generator=generator) * 6
    if kind == "flat":
        scores[0] = 0.0
    elif kind == "ties":
        scores = scores.round()
    elif kind == "few":
        scores[0, 3:] = -math.inf
    elif kind == "none":
        scores[0] = -math.inf
    elif kind == "nan":
        scores[0, 17] = math.nan
    elif kind == "huge":
        scores = scores * 1e36
    return scores


def rows_of(processors: tuple[Any, ...]) -> Rows:
    request = Request("r", Prompt(ids=np.array([1])), None, SeededDraws(0), processors=processors)
    table = TokenTable(ROWS, 4)
    sequences = [Sequence(request, table.open(np.array([1, 2])), 2, index=r) for r in range(ROWS)]
    return Rows(table, sequences, np.full(ROWS, 2))


def one_by_one(processors: tuple[Any, ...], scores: Tensor) -> Tensor:
    """Every processor on whole rows."""
    rows = rows_of(processors)
    for processor in processors:
        scores = processor.overwrite(rows, scores.clone())
    return scores


def at_position(position: int) -> Places:
    """Five choices after as many tokens, of one seed and of five lineages."""
    count = np.arange(ROWS, dtype=np.uint64)
    return Places(count * 0, count, np.full(ROWS, position), count.astype(int), ROWS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chain", range(len(CHAINS)))
@pytest.mark.parametrize("width", WIDTHS)
def test_a_shortlist_stands_for_the_rows(width: int, chain: int, kind: str) -> None:
    scores = drawn(kind, width)
    kept = scores.clone()
    short = apply(rows_of(CHAINS[chain]), Scores.of(scores))
    whole = one_by_one(CHAINS[chain], scores)
    # A row of nan has no distribution, whatever stands in it.
    certain = ~whole.isnan().any(dim=1)
    assert torch.equal(short.whole().values[certain], whole[certain])
    assert torch.equal(scores.nan_to_num(), kept.nan_to_num())
    for position in range(20):
        where = at_position(position)
        assert torch.equal(
            SeededDraws(0).choose(short, where), SeededDraws(0).choose(Scores.of(whole), where)
        )


@pytest.mark.parametrize("chain", range(4))
def test_top_k_leaves_a_shortlist(chain: int) -> None:
    assert apply(rows_of(CHAINS[chain]), Scores.of(drawn("spread", 8192))).listed


def test_forced_tokens_are_a_shortlist_of_themselves() -> None:
    scores = drawn("nan", 8192)
    begins = rows_of((es.ForcedBOSTokenLogitsProcessor(7),))
    begins.lengths[:] = 1
    short = apply(begins, Scores.of(scores))
    assert short.listed
    expected = reference.ForcedBOSTokenLogitsProcessor(7)(torch.ones(ROWS, 1), scores)
    assert torch.equal(short.whole().values, expected)
    begins.lengths[2] = 2
    mixed = apply(begins, Scores.of(scores))
    assert mixed.tokens is None
    assert torch.equal(mixed.values[2], scores[2])


def test_the_owned_scores_of_rows_that_are_shortened_stay_as_they_are_needed() -> None:
    scores = drawn("spread", 5000)
    bias = es.SequenceBiasLogitsProcessor({(3,): 50.0})
    owned = applied(rows_of((bias, *CHAINS[1])), scores.clone(), owned=True)
    assert torch.equal(owned, applied(rows_of((bias, *CHAINS[1])), scores))
    assert owned[:, 3].isfinite().all()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_of_equal_scores_lower_ids_go_first(top_p: float) -> None:
    scores = np.random.default_rng(0).integers(-2, 3, (40, 9)).astype(np.float32)
    removed = beyond_mass(scores, np.array([[top_p]]), np.array([[2]]))
    for row, gone in zip(scores.tolist(), removed, strict=True):
        best = sorted(range(9), key=lambda i: (row[i], i), reverse=True)
        mass, kept = 0.0, set[int]()
        for i in best:
            if mass < top_p * sum(map(math.exp, row)) - 1e-4 or len(kept) < 2:
                kept.add(i)
            mass += math.exp(row[i])
        assert {*np.flatnonzero(~gone).tolist()} == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TopKLogitsWarper", 50),
        ("TopPLogitsWarper", 0.9),
        ("TopPLogitsWarper", 0.3),
        ("MinPLogitsWarper", 0.1),
    ],
)
@pytest.mark.parametrize("spread", [0.1, 1.0, 8.0])
def test_wide_rows_keep_what_the_reference_keeps(name: str, value: float, spread: float) -> None:
    ids = torch.ones(ROWS, 2, dtype=torch.int64)
    scores = torch.randn(ROWS, 6000, generator=torch.Generator().manual_seed(1)).double() * spread
    theirs = getattr(reference, name)(value)(ids, scores)
    assert torch.equal(getattr(es, name)(value)(ids, scores), theirs)


@pytest.mark.parametrize("width", [4096, 4097, 9999])
def test_draws_follow_the_distribution_whatever_its_width(width: int) -> None:
    scores = torch.full((4000, width), -math.inf)
    scores[:, [1, width // 2, width - 1]] = torch.tensor([0.2, 0.3, 0.5]).log()
    count = np.arange(len(scores), dtype=np.uint64)
    where = Places(count * 0, count, count * 0, count.astype(int), len(count))
    tokens = SeededDraws(0).choose(Scores.of(scores), where)
    share = [float((tokens == t).double().mean()) for t in (1, width // 2, width - 1)]
    assert share == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
