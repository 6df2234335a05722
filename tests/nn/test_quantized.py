"""Quantised weights: their values, and rows that are joined and taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.errors import InvariantError
from everystep.nn.quantized import BLOCK, Format, QuantizedWeight

FORMATS: list[tuple[Format, bool]] = [
    ("int8", False),
    ("q8_0", False),
    ("q4_0", False),
    ("q4_1", True),
    ("int4", False),
    ("int4", True),
]


def random_weight(format: Format, minimum: bool, rows: int = 6, columns: int = 96):
    """Any codes with any scales."""
    dice = torch.Generator().manual_seed(rows * columns)
    blocks = (rows, columns // BLOCK)
    scales = torch.rand(blocks, generator=dice).half()
    if format == "int8":
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=dice)
        return QuantizedWeight(format, codes, torch.rand(rows, generator=dice))
    if format == "q8_0":
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=dice)
        return QuantizedWeight(format, codes, scales)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=dice)
    mins = torch.randn(blocks, generator=dice).half() if minimum else None
    return QuantizedWeight(format, codes, scales, mins)


def textbook_values(weight: QuantizedWeight) -> np.ndarray:
    """The definition, value by value, in float64."""
    codes, scales = weight.codes.numpy(), weight.scales.double().numpy()
    values = np.empty(weight.shape)
    for row, column in np.ndindex(*weight.shape):
        block, place = divmod(column, BLOCK)
        if weight.format == "int8":
            values[row, column] = codes[row, column] * scales[row]
        elif weight.format == "q8_0":
            values[row, column] = codes[row, column] * scales[row, block]
        else:
            byte = int(codes[row, 16 * block + place % 16])
            code = byte % 16 if place < 16 else byte // 16
            low = None if weight.mins is None else float(weight.mins[row, block])
            scale = scales[row, block]
            values[row, column] = (code - 8) * scale if low is None else code * scale + low
    return values


@pytest.mark.parametrize(("format", "minimum"), FORMATS)
def test_values_are_those_of_the_definition(format, minimum):
    weight = random_weight(format, minimum)
    assert weight.shape == (6, 96)
    wanted = torch.from_numpy(textbook_values(weight))
    # Only int8's product and the sum with a minimum round in float32.
    assert weight.dequantize().dtype == torch.float32
    assert torch.equal(weight.dequantize(), wanted.float())


@pytest.mark.parametrize(("format", "minimum"), FORMATS)
def test_rows_are_taken_apart_and_joined_without_a_change(format, minimum):
    weight = random_weight(format, minimum)
    values = weight.dequantize()
    top, rest = weight.slice(0, 2), weight.slice(2, 6)
    assert torch.equal(top.dequantize(), values[:2])
    whole = QuantizedWeight.cat([top, rest])
    assert torch.equal(whole.codes, weight.codes) and torch.equal(whole.dequantize(), values)
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(weight.gather(order).dequantize(), values[order])


def test_bytes_are_those_of_codes_scales_and_minimums():
    sizes = {"int8": 96 + 4, "q8_0": 3 * 34, "q4_0": 3 * 18, "q4_1": 3 * 20}
    for format, minimum in FORMATS[:4]:
        assert random_weight(format, minimum).bytes == 6 * sizes[format]


def test_rows_of_different_formats_are_not_joined():
    one, other = random_weight("q4_0", False), random_weight("q4_1", True)
    assert not one.alike(other)
    with pytest.raises(InvariantError, match="q4_0 of 96 columns, q4_1 of 96"):
        QuantizedWeight.cat([one, other])
    symmetric, minimum = random_weight("int4", False), random_weight("int4", True)
    assert not symmetric.alike(minimum)
