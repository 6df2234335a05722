"""Quantised weights: their values, and rows that are joined and taken apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.errors import InvariantError
from everystep.nn.quantized import (
    BLOCK,
    SUPER_BLOCK,
    WITH_SUPER_BLOCKS,
    Format,
    QuantizedWeight,
    block_bytes,
    packed_codes,
)

FORMATS: list[tuple[Format, bool]] = [
    ("int8", False),
    ("q8_0", False),
    ("q4_0", False),
    ("q4_1", True),
    ("int4", False),
    ("int4", True),
    ("q5_0", False),
    ("q4_k", True),
    ("q5_k", True),
    ("q6_k", False),
]


def random_weight(format: Format, minimum: bool, rows: int = 6, columns: int | None = None):
    """Any codes with any scales; without `columns` 96, or two super-blocks."""
    if columns is None:
        columns = 2 * SUPER_BLOCK if format in WITH_SUPER_BLOCKS else 96
    dice = torch.Generator().manual_seed(rows * columns)
    blocks = (rows, columns // BLOCK)
    scales = torch.rand(blocks, generator=dice).half()
    if format == "int8":
        codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=dice)
        return QuantizedWeight(format, codes, torch.rand(rows, generator=dice))
    if format == "q8_0":
        codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=dice)
        return QuantizedWeight(format, codes, scales)
    size = (rows, columns // BLOCK * block_bytes(format))
    codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=dice)
    if format in WITH_SUPER_BLOCKS:
        supers = torch.rand(rows, columns // SUPER_BLOCK * (1 + minimum), generator=dice).half()
        if format == "q6_k":
            small = torch.randint(-128, 128, (rows, columns // 16), generator=dice)
            return QuantizedWeight(format, codes, small.to(torch.int8), super_scales=supers)
        small = torch.randint(0, 64, (2, *blocks), generator=dice).to(torch.uint8)
        return QuantizedWeight(format, codes, *small, super_scales=supers)
    mins = torch.randn(blocks, generator=dice).half() if minimum else None
    return QuantizedWeight(format, codes, scales, mins)


def code_of(weight: QuantizedWeight, row: int, column: int) -> int:
    """One code of more than four bits or of super-blocks, as the definition places it."""
    bits = block_bytes(weight.format)
    block, place = divmod(column, BLOCK)
    own = weight.codes[row, block * bits : (block + 1) * bits].tolist()
    code = own[place % 16] % 16 if place < 16 else own[place % 16] // 16
    j, g = place % 4, place // 4
    if bits == 20:
        return code + 16 * (own[16 + j] >> g & 1)
    return code if bits == 16 else code + 16 * (own[16 + 4 * (g // 4) + j] >> 2 * (g % 4) & 3)


def parts_of(weight: QuantizedWeight, row: int, column: int) -> tuple[int, float, float]:
    """(code times its small scale, scale of the super-block, minimum) of one place."""
    assert weight.super_scales is not None
    code, supers = code_of(weight, row, column), weight.super_scales[row].tolist()
    if weight.mins is None:
        return (code - 32) * int(weight.scales[row, column // 16]), supers[column // 256], 0.0
    least = int(weight.mins[row, column // BLOCK]) * supers[len(supers) // 2 + column // 256]
    return code * int(weight.scales[row, column // BLOCK]), supers[column // 256], -least


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
        elif weight.format == "q5_0":
            values[row, column] = (code_of(weight, row, column) - 16) * scales[row, block]
        elif weight.super_scales is not None:
            whole, scale, low = parts_of(weight, row, column)
            values[row, column] = whole * scale + low
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
    assert weight.shape == (6, 512 if format in WITH_SUPER_BLOCKS else 96)
    wanted = torch.from_numpy(textbook_values(weight)).float()
    assert weight.dequantize().dtype == torch.float32
    if format in WITH_SUPER_BLOCKS and minimum:
        # A product and a sum round in float32.
        assert torch.allclose(weight.dequantize(), wanted, rtol=1e-6, atol=1e-4)
    else:
        # Only int8's product and the sum with a minimum round.
        assert torch.equal(weight.dequantize(), wanted)


@pytest.mark.parametrize("format", ["q4_k", "q5_0", "q5_k", "q6_k"])
def test_codes_are_packed_as_they_are_read(format):
    bits = block_bytes(format) // 4 - 4
    codes = torch.randint(0, 16 << bits, (3, 512)).to(torch.uint8)
    weight = random_weight(format, format in ("q4_k", "q5_k"), rows=3, columns=512)
    weight.codes.copy_(packed_codes(codes, bits))
    assert [[code_of(weight, r, c) for c in range(512)] for r in range(3)] == codes.tolist()


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
    sizes = {"int8": 96 + 4, "q8_0": 3 * 34, "q4_0": 3 * 18, "q4_1": 3 * 20, "q5_0": 3 * 22}
    sizes |= {"q4_k": 2 * 148, "q5_k": 2 * 180, "q6_k": 2 * 210}
    for format, minimum in FORMATS:
        if format in sizes:
            assert random_weight(format, minimum).bytes == 6 * sizes[format]


def test_rows_of_different_formats_are_not_joined():
    one, other = random_weight("q4_0", False), random_weight("q4_1", True)
    assert not one.alike(other)
    with pytest.raises(InvariantError, match="q4_0 of 96 columns, q4_1 of 96"):
        QuantizedWeight.cat([one, other])
    symmetric, minimum = random_weight("int4", False), random_weight("int4", True)
    assert not symmetric.alike(minimum)
