"""Attention equals its definition, however heads are folded; T5's biases are transformers'."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from everystep.nn.attention import (
    RelativeBias,
    Rule,
    additive,
    attend,
    attend_causally,
    fold_heads,
    probabilities,
    unfold_heads,
    visible,
)

R, T, H, K, D, S = 3, 4, 6, 2, 8, 11


def textbook(q, k, v, rule, seen):  # type: ignore[no-untyped-def]
    """(R, T, H, D) over (R, K, S, D), one head and one position at a time."""
    out = torch.zeros_like(q)
    for row in range(q.shape[0]):
        for head in range(q.shape[2]):
            keys, values = (x[row, head // (H // K)] for x in (k, v))
            for i in range(q.shape[1]):
                scores = keys @ q[row, i, head] * rule.scale
                if rule.softcap is not None:
                    scores = rule.softcap * torch.tanh(scores / rule.softcap)
                weights = torch.softmax(scores.masked_fill(~seen[row, i], -torch.inf), dim=0)
                out[row, i, head] = weights @ values
    return out


@pytest.mark.parametrize("rule", [Rule(0.3), Rule(0.3, softcap=2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("length", [1, T])
def test_folded_heads_attend_as_single_ones(rule: Rule, length: int) -> None:
    q = torch.randn(R, length, H, D, dtype=torch.float64)
    k, v = torch.randn(2, R, K, S, D, dtype=torch.float64)
    starts = torch.tensor([2, 5, 7])
    seen = visible(starts[:, None] + torch.arange(length), torch.arange(S).expand(R, S), None)
    mask = additive(seen, q.dtype)[:, None].repeat_interleave(H // K, dim=2)
    found = unfold_heads(attend(fold_heads(q, K), k, v, rule, mask), length)
    expected = textbook(q, k, v, rule, seen).reshape(R * length, H * D)
    assert torch.allclose(found, expected, atol=1e-12)


def test_causal_attention_sees_no_later_key() -> None:
    q = torch.randn(R, T, H, D, dtype=torch.float64)
    k, v = torch.randn(2, R, K, T, D, dtype=torch.float64)
    seen = visible(torch.arange(T), torch.arange(T), None).expand(R, T, T)
    found = attend_causally(q.transpose(1, 2), k, v, Rule(0.3)).transpose(1, 2)
    assert torch.allclose(found, textbook(q, k, v, Rule(0.3), seen), atol=1e-12)


def test_a_window_of_three_sees_three_keys() -> None:
    seen = visible(torch.arange(6), torch.arange(6), 3)
    assert seen.sum(dim=1).tolist() == [1, 2, 3, 3, 3, 3]
    assert bool(seen.diagonal().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types_sum_to_one_in_float32(dtype: torch.dtype) -> None:
    scores = torch.zeros(1, 3000, dtype=dtype)
    weights = probabilities(scores, Rule(1.0), None)
    assert weights.dtype == dtype
    assert float(weights[0, 0]) == pytest.approx(1 / 3000, rel=1e-2)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (6, 10)])
def test_buckets_are_the_references(both_ways: bool, buckets: int, farthest: int) -> None:
    distances = torch.arange(-300, 301)
    bias = RelativeBias(torch.zeros(buckets, 1), farthest, both_ways)
    expected = T5Attention._relative_position_bucket(distances, both_ways, buckets, farthest)
    assert torch.equal(bias.bucket(distances), expected)


def test_a_bias_is_looked_up_by_key_minus_query() -> None:
    table = torch.arange(8.0).view(8, 1).repeat(1, 3)
    bias = RelativeBias(table, 20, False)(torch.tensor([5, 6]), torch.tensor([3, 5, 6]))
    assert bias.shape == (3, 2, 3)
    assert bias[0].tolist() == [[2.0, 0.0, 0.0], [3.0, 1.0, 0.0]]
