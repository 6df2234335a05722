"""Values as blocks: little is lost, and least where it matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from everystep.errors import UnsupportedError
from everystep.files.gguf_blocks import decode_blocks
from everystep.files.gguf_writer import BLOCKS
from everystep.models.gguf_encoders import ENCODERS, encode_rows, importance_of
from tests.files.gguf_writer import encode

# Root mean square error beside that of the values, for normal ones: half a step of the codes,
# divided by the root of 3, where a block's largest value is 2.1 (of 32) or 2.8 (of 256) times it.
LOSS = {"Q8_0": 0.006, "Q5_0": 0.042, "Q4_K": 0.073, "Q5_K": 0.036, "Q6_K": 0.018}


def normal(rows: int = 24, columns: int = 512, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def decoded(kind: str, raw: Tensor, shape: Any) -> Tensor:
    return decode_blocks(BLOCKS[kind], raw.reshape(-1), torch.float32).view(shape)


def rounded(kind: str, values: Tensor, columns: Tensor | None = None) -> Tensor:
    raw = encode_rows(BLOCKS[kind], values, columns)
    per_row = values.shape[1] // BLOCKS[kind].elements * BLOCKS[kind].nbytes
    assert raw.dtype == torch.uint8 and raw.shape == (len(values), per_row)
    return decoded(kind, raw, values.shape)


def error(values: Tensor, found: Tensor) -> float:
    return float(((values - found).square().mean() / values.square().mean()).sqrt())


@pytest.mark.parametrize("kind", ENCODERS)
def test_little_is_lost(kind: str) -> None:
    assert error(normal(), rounded(kind, normal())) < LOSS[kind]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_less_is_lost_than_by_plain_rounding(kind: str) -> None:
    plain = decoded(
        kind, torch.frombuffer(bytearray(encode(kind, normal())), dtype=torch.uint8), (24, 512)
    )
    assert error(normal(), rounded(kind, normal())) < 0.95 * error(normal(), plain)


@pytest.mark.parametrize("kind", ENCODERS)
def test_rounding_again_changes_little(kind: str) -> None:
    """Values that a block holds exactly are found again, or nearly."""
    once = rounded(kind, normal())
    assert error(once, rounded(kind, once)) < LOSS[kind] / 3


@pytest.mark.parametrize("kind", ENCODERS)
def test_rows_do_not_depend_on_each_other(kind: str) -> None:
    values = normal(300)  # more than one chunk
    assert torch.equal(rounded(kind, values)[7:9], rounded(kind, values[7:9]))


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2, 256),
        torch.full((2, 256), 0.7),
        torch.full((2, 256), -0.7),
        torch.cat([torch.zeros(2, 255), torch.full((2, 1), 3.0)], 1),
        torch.arange(512.0).view(2, 256),
        -torch.arange(512.0).view(2, 256),
        torch.full((2, 256), 1e-12),
        normal(2, 256).to(torch.bfloat16),
    ],
    ids=["zeros", "equal", "equal and negative", "one", "rising", "falling", "tiny", "bfloat16"],
)
def test_special_blocks(kind: str, values: Tensor) -> None:
    found = rounded(kind, values)
    assert bool(found.isfinite().all())
    far = float(values.float().abs().max())
    assert float((found - values.float()).abs().max()) <= 0.1 * far + 1e-9


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q5_K", "Q6_K"])
def test_columns_that_matter_lose_less(kind: str) -> None:
    values, columns = normal(), torch.ones(512)
    columns[::8] = 1000.0
    plain, weighed = rounded(kind, values), rounded(kind, values, columns)
    important = slice(None, None, 8)
    first, second = (error(values[:, important], one[:, important]) for one in (plain, weighed))
    assert second < 0.8 * first


@pytest.mark.parametrize("kind", ENCODERS)
def test_columns_that_nothing_was_multiplied_by_are_not_given_up(kind: str) -> None:
    columns = torch.zeros(512)
    columns[:256] = 1.0
    values = normal()
    found = rounded(kind, values, columns)
    assert error(values[:, 256:], found[:, 256:]) < 2 * LOSS[kind]
    assert bool(rounded(kind, values, torch.zeros(512)).isfinite().all())


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("kind", ENCODERS)
def test_what_no_scale_reaches_is_refused(kind: str, wrong: float) -> None:
    values = normal(2)
    values[1, 3] = wrong
    with pytest.raises(UnsupportedError, match="float16"):
        encode_rows(BLOCKS[kind], values)


def test_importance_is_positive_and_follows_the_columns() -> None:
    values, columns = normal(), torch.rand(512)
    found = importance_of(values, columns)
    assert bool((found > 0).all()) and found.shape == values.shape
    twice = importance_of(values, 2 * columns)
    torch.testing.assert_close(found, twice)  # only how columns compare matters
