"""A linear map with quantised weights: the definition, and what is built from several weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.nn.linear import (
    Linear,
    QuantizedLinear,
    dense,
    joined,
    look_up,
    packed_linear,
    rounded_activations,
    shared_linear,
)
from everystep.nn.quantized import BLOCK, QuantizedWeight
from tests.nn.test_quantized import FORMATS, code_of, parts_of, random_weight


def textbook(weight: QuantizedWeight, x: Tensor) -> np.ndarray:
    """docs/decisions/009 word by word: integers where it has integers, sums in float64."""
    out = np.zeros((len(x), weight.rows))
    for one, values in zip(out, x.numpy(), strict=True):
        for b, part in enumerate(np.split(values, range(BLOCK, len(values), BLOCK))):
            step = np.float32(np.abs(part).max()) / np.float32(127)
            codes = np.rint(part / step if step else part).astype(np.int64)
            assert np.abs(codes).max() <= 127
            for row in range(weight.rows):
                integers, scale, low = block_of(weight, row, b)
                dot = int(integers @ codes)
                one[row] += float(step) * (scale * dot + low * int(codes.sum()))
    return out


def block_of(weight: QuantizedWeight, row: int, b: int) -> tuple[np.ndarray, float, float]:
    """(integers, scale, minimum) of one block."""
    if weight.format == "int8":
        codes = weight.codes[row, 32 * b : 32 * b + 32].numpy().astype(np.int64)
        return codes, float(weight.scales[row]), 0.0
    if weight.super_scales is not None:
        each = [parts_of(weight, row, column) for column in range(32 * b, 32 * b + 32)]
        return np.array([whole for whole, _, _ in each]), each[0][1], each[0][2]
    scale = float(weight.scales[row, b])
    if weight.format == "q5_0":
        codes = [code_of(weight, row, column) - 16 for column in range(32 * b, 32 * b + 32)]
        return np.array(codes), scale, 0.0
    if weight.format == "q8_0":
        return weight.codes[row, 32 * b : 32 * b + 32].numpy().astype(np.int64), scale, 0.0
    packed = weight.codes[row, 16 * b : 16 * b + 16].numpy().astype(np.int64)
    codes = np.concatenate([packed % 16, packed // 16])
    if weight.mins is None:
        return codes - 8, scale, 0.0
    return codes, scale, float(weight.mins[row, b])


@pytest.mark.parametrize(("format", "minimum"), FORMATS)
@pytest.mark.parametrize("count", [1, 7])
def test_it_is_the_definition(format, minimum, count) -> None:
    weight = random_weight(format, minimum, rows=11)
    x = torch.randn(count, weight.columns, generator=torch.Generator().manual_seed(count))
    x[0, :32] = 0
    wanted = textbook(weight, x)
    found = QuantizedLinear(weight)(x)
    assert np.abs(found.numpy() - wanted).max() < 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize(("format", "minimum"), FORMATS)
def test_exact_activations_meet_the_values_of_the_weight(format, minimum) -> None:
    weight = random_weight(format, minimum)
    x, bias = torch.randn(3, weight.columns), torch.randn(6)
    wanted = (x.double() @ weight.dequantize().double().T + bias).float()
    found, near = packed_linear(weight, bias, exact_activations=True)(x), 1e-6 * wanted.abs().max()
    assert torch.allclose(found, wanted, atol=max(1e-4, float(near)))
    assert not torch.allclose(packed_linear(weight, bias)(x), wanted, atol=max(1e-4, float(near)))


def test_stretches_are_side_by_side(monkeypatch) -> None:
    weight, x = random_weight("q4_1", True, rows=50), torch.randn(4, 96)
    whole = QuantizedLinear(weight)(x)
    monkeypatch.setattr("everystep.nn.linear._STRETCH_VALUES", 7 * 96)
    assert torch.allclose(QuantizedLinear(weight)(x), whole, atol=1e-5)


def test_any_leading_dimensions_and_a_residual_that_stays() -> None:
    linear = packed_linear(random_weight("q8_0", False), torch.ones(6))
    x, residual = torch.randn(2, 3, 96), torch.randn(2, 3, 6)
    before = residual.clone()
    assert torch.allclose(linear(x)[1, 2], linear(x[1, 2]), atol=1e-4)
    assert torch.equal(linear.add_to(residual, x), residual + linear(x))
    assert torch.equal(residual, before)


def test_int8_takes_inputs_that_are_no_whole_blocks() -> None:
    weight, x = random_weight("int8", False, columns=77), torch.randn(3, 77)
    wanted = textbook(weight, x)
    assert np.abs(QuantizedLinear(weight)(x).numpy() - wanted).max() < 2e-6 * np.abs(wanted).max()


def test_activations_move_by_half_a_step_at_most() -> None:
    x = torch.randn(5, 96) * torch.logspace(-20, 15, 5)[:, None]
    rounded, blocks = rounded_activations(x).view(5, 3, 32), x.view(5, 3, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    assert bool(((rounded - blocks).abs() <= 0.5001 * step).all())
    far = blocks.abs().argmax(-1, keepdim=True)
    assert torch.allclose(rounded.gather(-1, far), blocks.gather(-1, far), rtol=1e-6)


def test_halves_go_to_the_even_neighbour() -> None:
    x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5] + [0.0] * 26)
    expected = [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]
    assert rounded_activations(x)[:6].tolist() == expected


def test_the_smallest_and_the_unbounded() -> None:
    tiny = torch.full((32,), 1e-45)
    assert torch.isfinite(rounded_activations(tiny)).all()
    assert rounded_activations(torch.zeros(32)).tolist() == [0.0] * 32
    for bad in (float("nan"), float("inf")):
        x = torch.ones(64)
        x[3] = bad
        rounded = rounded_activations(x)
        assert not torch.isfinite(rounded[:32]).any()
        assert torch.equal(rounded[32:], torch.ones(32))


def test_alike_weights_become_one_and_others_stay_parts() -> None:
    q4, q8 = random_weight("q4_1", True), random_weight("q8_0", False)
    one = joined([q4, q4])
    assert isinstance(one, QuantizedWeight) and one.rows == 12
    parts = joined([q4, q8, torch.randn(2, 96)])
    assert isinstance(parts, tuple)
    x, bias = torch.randn(3, 96), torch.randn(14)
    found = packed_linear(parts, bias, exact_activations=True)
    assert torch.allclose(found(x), x @ dense(parts).T + bias, atol=1e-4)
    assert [type(part) for part in found.parts] == [QuantizedLinear, QuantizedLinear, Linear]
    assert found.matrix()[0] is q4
    residual = torch.randn(3, 14)
    assert torch.equal(found.add_to(residual, x), residual + found(x))


@pytest.mark.parametrize(("format", "minimum"), FORMATS)
def test_a_table_is_looked_up_row_by_row(format, minimum) -> None:
    weight = random_weight(format, minimum)
    tokens = torch.tensor([[5, 0], [2, 5]])
    assert torch.equal(look_up(weight, tokens), weight.dequantize()[tokens])
    assert shared_linear(weight).matrix() is weight
