"""A linear map gives the same numbers in every layout."""

from __future__ import annotations

import pytest
import torch

from everystep.nn.linear import Linear, packed_linear, runs_on_onednn, shared_linear

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.02}


def weights(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 24, generator=generator, dtype=torch.float64)
    return weight.to(dtype), torch.randn(37, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [packed_linear, shared_linear, Linear])
@pytest.mark.parametrize("shape", [(24,), (1, 24), (40, 24), (2, 3, 24)])
def test_it_is_the_product_plus_the_bias(dtype, make, shape) -> None:
    weight, bias = weights(dtype)
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    expected = x.double() @ weight.double().T + bias.double()
    found = make(weight, bias)(x)
    assert found.dtype == dtype
    assert (found.double() - expected).abs().max() < DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_it_adds_to_a_residual_and_leaves_it(dtype) -> None:
    weight, bias = weights(dtype)
    x, residual = torch.randn(5, 24, dtype=dtype), torch.randn(5, 37, dtype=dtype)
    before = residual.clone()
    found = packed_linear(weight, bias).add_to(residual, x)
    assert torch.allclose(found, x @ weight.T + bias + before, atol=1e-5)
    assert torch.equal(residual, before)


def test_inputs_need_not_be_contiguous() -> None:
    weight, _ = weights(torch.float32)
    x = torch.randn(24, 6).T
    assert torch.allclose(packed_linear(weight)(x), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_weight_unpacks_to_the_same_bits(dtype) -> None:
    weight, _ = weights(dtype)
    assert torch.equal(packed_linear(weight).matrix(), weight)


def test_types_that_onednn_would_emulate_stay_plain() -> None:
    assert not runs_on_onednn(torch.empty(1, dtype=torch.float64))
