"""Penalties of ids that stand in prefixes: bit for bit transformers', in every type and size."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep as es
from everystep.processors.edits import stretches
from everystep.processors.remembered import Occurrences

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PENALTIES = (1.0, 1.2, 0.7, 2, 1e-38, 3e38, 1e-45)


def extreme_scores(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Ordinary scores, and per row all that a number can be."""
    scores = torch.randn(rows, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    limits = torch.finfo(dtype)
    odd = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, limits.max, limits.min, limits.tiny]
    scores[:, : len(odd)] = torch.tensor(odd, dtype=torch.float64).to(dtype)
    return scores


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, the sign of 0 included; nan is nan."""
    kept = ~theirs.isnan()
    signs = torch.signbit(ours[kept]) == torch.signbit(theirs[kept])
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[kept], theirs[kept]) and (
        bool(signs.all())
    )  # fmt: skip


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_penalty_gives_the_bits_of_the_reference(dtype: torch.dtype, penalty: float) -> None:
    ids = torch.cat([torch.arange(12), torch.randint(0, 90, (40,))]).repeat(3, 1)
    scores = extreme_scores(3, 100, dtype)
    expected = reference.RepetitionPenaltyLogitsProcessor(float(penalty))(ids, scores.clone())
    assert same_bits(es.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores), expected)
    pair = (reference, es)
    told = [one.EncoderRepetitionPenaltyLogitsProcessor(float(penalty), ids) for one in pair]
    their_scores, our_scores = (one(ids, scores.clone()) for one in told)
    assert same_bits(our_scores, their_scores)


@pytest.mark.parametrize("sizes", [[10, 20, 5], [3000, 3000, 10, 20, 4000], [0, 0, 7], [5000]])
def test_any_number_of_places_is_penalised(sizes: list[int]) -> None:
    size = 5_000
    scores = torch.randn(len(sizes), size)
    tokens = [torch.randperm(size)[:count].numpy() for count in sizes]
    found = list(stretches(tokens, scores))
    assert [s.rows.start for s in found] == [0, *(s.rows.stop for s in found[:-1])]
    for stretch in found:
        row, token = np.divmod(stretch.places, size)
        own = np.concatenate(tokens[stretch.rows])
        assert (token == own).all()
        assert Counter(row.tolist()) == {r: n for r, n in enumerate(stretch.counts) if n}


def test_every_row_has_its_own_numbers() -> None:
    ids = torch.randint(0, 3000, (5, 2500))
    scores, penalties = torch.randn(5, 3000), (1.2, 0.7, 1.0, 3.0, 1e38)
    ours = es.RepetitionPenaltyLogitsProcessor(list(penalties))(ids, scores)
    alone = [
        es.RepetitionPenaltyLogitsProcessor(penalty)(ids[r : r + 1], scores[r : r + 1])
        for r, penalty in enumerate(penalties)
    ]
    assert torch.equal(ours, torch.cat(alone))


def test_gradients_pass_through_a_penalty() -> None:
    scores = torch.tensor([[2.0, -2.0, 1.0]], requires_grad=True)
    es.RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1]]), scores).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [[0.5, 2.0, 1.0]]


@pytest.mark.parametrize("seed", range(10))
def test_occurrences_are_counted_through_sorts_and_rewinds(seed: int) -> None:
    pick = random.Random(seed)
    line = np.array([pick.randrange(pick.choice([5, 500])) for _ in range(1500)])
    memory, length, start = Occurrences(3), 0, 3
    for _ in range(60):
        step: Any = pick.choice([1, 1, 1, 2, 20, 90, -1, -3, -70])
        length = min(max(length + step, 0), len(line))
        memory.read(line, length)
        other = memory.copy()
        memory.read(line, min(length + pick.choice([1, 40]), len(line)))
        told = dict(zip(other.tokens.tolist(), other.counts.tolist(), strict=True))
        assert told == Counter(line[start : max(length, start)].tolist())
        assert sorted(other.below(50).tolist()) == sorted(t for t in told if t < 50)
