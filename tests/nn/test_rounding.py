"""Float weights in 8 and 4 bits: how far a value may move, and which form is taken."""

from __future__ import annotations

import pytest
import torch

from everystep.errors import UnsupportedError
from everystep.nn import rounding
from everystep.nn.rounding import quantize


def values(rows: int = 9, columns: int = 128) -> torch.Tensor:
    """Rows of very different sizes."""
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))
    return drawn * torch.logspace(-3, 1, rows)[:, None]


def test_int8_moves_a_value_by_half_a_scale() -> None:
    given = values()
    weight = quantize(given, "int8")
    assert (weight.format, weight.scales.dtype, weight.scales.shape) == (
        "int8",
        torch.float32,
        (9,),
    )
    off = (weight.dequantize() - given).abs()
    assert bool((off <= 0.5001 * weight.scales[:, None]).all())
    assert torch.equal(weight.codes.abs().amax(1), torch.full((9,), 127, dtype=torch.int8))


def test_int4_with_a_minimum_moves_a_value_by_half_a_step() -> None:
    given = values() + 3.0
    weight = quantize(given, "int4")
    assert weight.mins is not None
    blocks = given.view(9, -1, 32)
    span = blocks.amax(-1) - blocks.amin(-1)
    # Scale and minimum are float16: that moves a value beside the rounding of its code.
    bound = 0.52 * span / 15 + blocks.abs().amax(-1) / 1024
    off = (weight.dequantize() - given).view(9, -1, 32).abs()
    assert bool((off <= bound[..., None]).all())


def test_int4_around_zero_is_taken_where_it_is_closer() -> None:
    grid = torch.arange(-8, 8).float().repeat(4, 4) * 0.25
    weight = quantize(grid, "int4")
    assert weight.mins is None
    assert torch.equal(weight.dequantize(), grid)
    lopsided = torch.linspace(1.0, 2.5, 16).repeat(4, 4)
    assert quantize(lopsided, "int4").mins is not None


def test_of_two_forms_the_closer_one_is_taken() -> None:
    given = values()
    error = {
        form: float((form(given).dequantize() - given).square().sum())
        for form in (rounding._symmetric, rounding._lifted)
    }
    found = float((quantize(given, "int4").dequantize() - given).square().sum())
    assert found == min(error.values()) < max(error.values())


def test_stretches_do_not_show(monkeypatch) -> None:
    given = values()
    whole = quantize(given, "int4")
    monkeypatch.setattr("everystep.nn.rounding._STRETCH_VALUES", 256)
    parts = quantize(given, "int4")
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_zeros_stay_zeros_and_other_types_are_read(format) -> None:
    assert not quantize(torch.zeros(2, 64), format).dequantize().any()
    wide = values().to(torch.bfloat16)
    assert torch.equal(quantize(wide, format).codes, quantize(wide.float(), format).codes)


def test_groups_must_be_whole_and_scales_storable() -> None:
    with pytest.raises(UnsupportedError, match=r"multiple of 32; got 48.*int8"):
        quantize(torch.randn(2, 48), "int4")
    with pytest.raises(UnsupportedError, match="too large"):
        quantize(torch.full((2, 32), 1e7), "int4")
    assert torch.equal(
        quantize(torch.full((2, 32), 1e7), "int8").dequantize(), torch.full((2, 32), 1e7)
    )
