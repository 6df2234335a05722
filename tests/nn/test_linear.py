"""A linear map gives the same numbers in every layout."""

from __future__ import annotations

import pytest
import torch

from everystep.errors import UnsupportedError
from everystep.nn.linear import Linear, packed_linear, runs_on_onednn, shared_linear
from everystep.nn.panels import Arena, Panels
from everystep.nn.rounding import quantize

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


def frozen_linears() -> dict[str, object]:
    """A map in each packed storage."""
    weight = torch.randn(64, 32)
    panels, codes = Panels.of(weight, Arena()), quantize(weight, "int8")
    return {
        "onednn": packed_linear(weight),
        "a tied head": shared_linear(weight),
        "panels": packed_linear(panels),
        "codes": packed_linear(codes),
        "codes in panels": packed_linear(Panels.of(codes, Arena())),
        "joined": packed_linear((panels, codes)),
    }


@pytest.mark.parametrize("name", frozen_linears())
def test_packed_storage_refuses_gradients(name) -> None:
    linear, x = frozen_linears()[name], torch.randn(3, 32, requires_grad=True)
    residual = torch.randn(3, 128 if name == "joined" else 64)
    with pytest.raises(UnsupportedError, match="no gradient passes"):
        linear(x)
    with pytest.raises(UnsupportedError, match="no gradient passes"):
        linear.add_to(residual, x)
    with torch.no_grad():
        assert torch.allclose(linear(x), linear(x.detach()), atol=1e-5)
    assert not linear(x.detach()).requires_grad


def test_a_packed_map_refuses_a_bias_that_learns() -> None:
    bias = torch.zeros(64, requires_grad=True)
    for weight in (torch.randn(64, 32), Panels.of(torch.randn(64, 32), Arena())):
        with pytest.raises(UnsupportedError, match="no gradient passes"):
            packed_linear(weight, bias)(torch.randn(3, 32))


@pytest.mark.parametrize("make", [packed_linear, shared_linear])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_weight_that_requires_gradients_stays_plain_and_gets_them(make, dtype) -> None:
    weight, bias = weights(dtype)
    x, residual = torch.randn(5, 24, dtype=dtype), torch.randn(5, 37, dtype=dtype)
    leaves = [one.requires_grad_() for one in (x, weight, bias, residual)]
    linear = make(weight, bias)
    assert linear.matrix() is weight
    (linear(x).sum() + (2 * linear.add_to(residual, x)).sum()).backward()
    ones = torch.ones(5, 37, dtype=dtype)
    expected = [3 * ones @ weight, 3 * ones.T @ x, 3 * ones.sum(0), 2 * ones]
    for leaf, wanted in zip(leaves, expected, strict=True):
        assert torch.allclose(leaf.grad, wanted, atol=1e-5)
