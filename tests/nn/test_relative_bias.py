"""The buckets of T5's relative bias are the reference's."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from everystep.nn.attention import RelativeBias


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
