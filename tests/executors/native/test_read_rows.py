"""The library gives the values of rows in panels as operators give them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from everystep.executors.native import build, library, packing, read_rows
from everystep.nn.panels import Arena, Panels
from tests.nn.test_panels import KINDS, weight_of

COLUMNS = {"float32": 77, "float16": 33, "bfloat16": 16, "int8": 77}


@pytest.fixture(params=[name for name in build.fitting_sets() if build.library_path(name).exists()])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    opened = library.open_library(build.library_path(request.param))
    monkeypatch.setattr(packing, "load", lambda: opened)
    return str(request.param)


@pytest.mark.parametrize(("kind", "minimum"), KINDS)
def test_values_of_rows_are_those_of_operators(kind: str, minimum: bool, instructions: str) -> None:
    for columns in (512, COLUMNS.get(kind, 256)):
        weight = weight_of(kind, minimum, 50, columns)
        panels = Panels.of(weight, Arena(), read_rows)
        wanted = weight.float() if isinstance(weight, Tensor) else weight.dequantize()
        for start, stop in ((0, 50), (0, 16), (3, 5), (5, 37), (16, 32), (48, 50), (7, 7)):
            found = panels.dense(start, stop)
            assert found.dtype == torch.float32
            assert torch.equal(found, wanted[start:stop])


def test_rows_beyond_the_last_are_no_rows() -> None:
    panels = Panels.of(torch.randn(20, 8), Arena(), read_rows)
    assert panels.dense(16, 99).shape == (4, 8) and panels.dense(30, 40).shape == (0, 8)
