"""Panels hold every bit of a weight, where the kernels look for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everystep.nn.linear import Rows, dense, look_up, packed_linear, rows_of
from everystep.nn.panels import PANEL, Arena, Panels
from everystep.nn.quantized import QuantizedWeight, block_bytes
from tests.nn.test_quantized import FORMATS, code_of, random_weight

SIXTEEN_BITS = ["float16", "bfloat16"]
KINDS = [*((kind, False) for kind in ("float32", *SIXTEEN_BITS)), *FORMATS]


def weight_of(kind: str, minimum: bool, rows: int, columns: int | None = None) -> Rows:
    if "float" in kind:
        values = torch.randn(rows, columns or 96, generator=torch.Generator().manual_seed(rows))
        return values.to(getattr(torch, kind))
    return random_weight(kind, minimum, rows=rows, columns=columns)


def assert_same(found: Rows, wanted: Rows) -> None:
    """Bit for bit, of the same types and formats."""
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor) and found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
        return
    assert isinstance(found, QuantizedWeight) and found.format == wanted.format
    pairs = zip(found.tensors().values(), wanted.tensors().values(), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48, 50])
def test_every_bit_comes_back(kind: str, minimum: bool, rows: int) -> None:
    weight = weight_of(kind, minimum, rows)
    panels = Panels.of(weight, Arena())
    assert panels.shape == tuple(weight.shape)
    for start, stop in ((0, rows), (0, 1), (rows - 1, rows), (rows // 3, rows // 2 + 1)):
        assert_same(panels.slice(start, stop), rows_of(weight, start, stop))
    chosen = torch.tensor([rows - 1, 0, rows // 2, 0])
    wanted = weight[chosen] if isinstance(weight, Tensor) else weight.gather(chosen)
    assert_same(panels.gather(chosen), wanted)


@pytest.mark.parametrize("kind", ["int8", *SIXTEEN_BITS])
def test_columns_that_are_no_whole_blocks_or_lines(kind: str) -> None:
    weight = weight_of(kind, False, 20, columns=77)
    assert_same(Panels.of(weight, Arena()).slice(0, 20), weight)


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_whole_panels_are_read_where_they_lie(kind: str, minimum: bool) -> None:
    weight = weight_of(kind, minimum, 50)
    panels = Panels.of(weight, Arena())
    for start, stop in ((0, 16), (16, 48), (32, 50), (0, 50)):
        part = panels.whole(start, stop)
        assert part is not None
        assert_same(part.slice(0, stop - start), rows_of(weight, start, stop))
        assert part.data.data_ptr() == panels.data[start // PANEL].data_ptr()
    assert panels.whole(8, 16) is None and panels.whole(0, 40) is None


@pytest.mark.parametrize(("kind", "minimum"), FORMATS[:6])
def test_codes_lie_where_the_kernels_look(kind: str, minimum: bool) -> None:
    weight = random_weight(kind, minimum, rows=20, columns=64)
    panel = Panels.of(weight, Arena()).data[1]
    block, row, column = 1, 2, 21  # row 2 of the second panel is row 18
    if weight.codes.dtype == torch.int8:
        place = 512 * block + 64 * (column // 4) + 4 * row + column % 4
        assert panel[place].item() == weight.codes[18, 32 + column].item() + 128
        after = 1024
    else:
        byte = column - 16  # this column is in the high half of its byte
        place = 256 * block + 64 * (byte // 4) + 4 * row + byte % 4
        assert panel[place].item() == weight.codes[18, 16 + byte].item()
        after = 512
    if kind != "int8":
        halves = panel[after:].view(torch.float16)
        assert halves[PANEL * block + row] == weight.scales[18, block]
    if minimum:
        assert weight.mins is not None
        assert halves[2 * PANEL + PANEL * block + row] == weight.mins[18, block]


@pytest.mark.parametrize(("kind", "minimum"), FORMATS[6:])
def test_codes_of_more_bits_lie_where_the_kernels_look(kind: str, minimum: bool) -> None:
    weight = random_weight(kind, minimum, rows=20, columns=512)
    panel = Panels.of(weight, Arena()).data[1]
    bits = block_bytes(kind) // 4
    block, row, column = 9, 2, 27  # row 2 of the second panel is row 18
    place = 64 * bits * block + 64 * (column // 4 - 4) + 4 * row + column % 4
    code = panel[place].item() >> 4  # this column is in the high half of its byte
    if bits == 5:
        code += 16 * (panel[64 * bits * block + 256 + 4 * row + 3].item() >> 6 & 1)
    if bits == 6:
        code += 16 * (panel[64 * bits * block + 256 + 64 + 4 * row + 3].item() >> 4 & 3)
    assert code == code_of(weight, 18, 32 * block + column)
    after = panel[64 * bits * 16 :]
    if kind == "q5_0":
        assert after.view(torch.float16)[PANEL * block + row] == weight.scales[18, block]
        return
    assert weight.super_scales is not None
    parts = 1 if minimum else 2
    small = after.view(weight.scales.dtype)
    assert small[PANEL * parts * block + row] == weight.scales[18, parts * block]
    supers = after[2 * 16 * PANEL :].view(torch.float16)
    assert supers[PANEL + row] == weight.super_scales[18, 1]
    if minimum:
        assert weight.mins is not None
        assert small[16 * PANEL + PANEL * block + row] == weight.mins[18, block]
        assert supers[3 * PANEL + row] == weight.super_scales[18, 3]


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_torch_reads_panels_as_it_reads_rows(kind: str, minimum: bool, shape) -> None:
    weight = weight_of(kind, minimum, 50)
    x = torch.randn(*shape, weight.shape[1])
    linear = packed_linear(Panels.of(weight, Arena()), torch.ones(50))
    rows = weight.float() if isinstance(weight, Tensor) else weight
    wanted = packed_linear(rows, torch.ones(50))(x)
    near = max(1e-4, 1e-6 * float(wanted.abs().max()))
    assert linear(x).shape == wanted.shape and torch.allclose(linear(x), wanted, atol=near)
    residual = torch.randn(wanted.shape)
    assert torch.allclose(linear.add_to(residual, x), residual + wanted, atol=near)


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_a_table_in_panels_is_looked_up(kind: str, minimum: bool) -> None:
    weight, tokens = weight_of(kind, minimum, 50), torch.tensor([[49, 0], [16, 49]])
    found = look_up(Panels.of(weight, Arena()), tokens)
    assert found.dtype == torch.float32 and torch.equal(found, dense(weight).float()[tokens])


def test_an_arena_begins_every_matrix_at_a_cache_line() -> None:
    arena = Arena()
    rooms = [arena.room(size) for size in (1, 65, 64, 1 << 27, 7)]
    assert [len(room) for room in rooms] == [1, 65, 64, 1 << 27, 7]
    assert all(room.data_ptr() % 64 == 0 for room in rooms)
    assert arena.bytes == 64 + 128 + 64 + (1 << 27) + 64
    for number, room in enumerate(rooms):
        room.fill_(number)
    assert all(bool((room == number).all()) for number, room in enumerate(rooms))


def test_bytes_are_those_that_are_held() -> None:
    weight = random_weight("q4_1", True, rows=32, columns=64)
    assert Panels.of(weight, Arena()).data.nbytes == weight.bytes
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        floats = torch.randn(32, 64).to(dtype)
        assert Panels.of(floats, Arena()).data.nbytes == floats.nbytes
