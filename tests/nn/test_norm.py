"""Norms and the gated activation follow their definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from everystep.nn.activations import gated
from everystep.nn.norm import Norm

X = torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize("plus_one", [False, True])
def test_root_mean_square(plus_one: bool) -> None:
    expected = X / (X.square().mean(-1, keepdim=True) + 0.1).sqrt() * (WEIGHT + plus_one)
    found = Norm("rms", 0.1, WEIGHT, plus_one=plus_one)(X)
    assert found.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=1e-6)


def test_layer_norm_centres_and_adds_the_bias() -> None:
    found = Norm("layer", 1e-5, WEIGHT, bias=WEIGHT)(X)
    assert torch.allclose(found, F.layer_norm(X, (3,), WEIGHT, WEIGHT, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_squares_of_narrow_types_do_not_overflow(dtype: torch.dtype) -> None:
    large = torch.full((1, 3), 6e4).to(dtype)
    found = Norm("rms", 1e-6, torch.ones(3, dtype=dtype))(large)
    assert found.dtype == dtype
    assert torch.equal(found, torch.ones(1, 3, dtype=dtype))


def test_the_gate_comes_before_what_it_gates() -> None:
    x = torch.tensor([[1.0, -1.0, 3.0, 4.0]])
    assert gated(x, F.relu).tolist() == [[3.0, 0.0]]
