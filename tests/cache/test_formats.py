"""What rows keep of keys and values in each type, judged by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from everystep.cache.formats import CacheDtype, KvFormat

VALUES = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_without_a_choice_nothing_is_rounded_or_copied() -> None:
    kept = KvFormat(torch.float64)
    assert kept.packed(VALUES) is VALUES and kept.unpacked(VALUES) is VALUES
    assert kept.width(16) == 16


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_floats_are_rounded_to_the_nearest(name: CacheDtype) -> None:
    kept = KvFormat(torch.float64, name)
    found = kept.unpacked(kept.packed(VALUES))
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), VALUES.numpy().astype(name).astype("float64"))


def test_codes_have_a_scale_per_position_and_head() -> None:
    kept = KvFormat(torch.float64, "int8")
    packed = kept.packed(VALUES)
    assert packed.dtype == torch.int8 and packed.shape == (3, 2, 20)
    assert kept.width(16) == 20
    exact = VALUES.numpy().astype(np.float32)
    scales = np.abs(exact).max(-1, keepdims=True) / np.float32(127)
    wanted = np.round(exact / scales) * scales
    found = kept.unpacked(packed)
    assert np.array_equal(found.numpy(), wanted.astype("float64"))
    assert np.abs(found.numpy() - VALUES.numpy()).max() <= 0.51 * scales.max()


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_what_was_rounded_is_not_rounded_again(name: CacheDtype) -> None:
    kept = KvFormat(torch.float32, name)
    spread = VALUES.float() * 10.0 ** torch.arange(-6, 6).view(-1, 1, 1, 1)
    once = kept.unpacked(kept.packed(spread))
    assert torch.equal(kept.unpacked(kept.packed(once)), once)


def test_what_is_not_finite_stays_so() -> None:
    kept = KvFormat(torch.float32, "int8")
    for odd in (torch.nan, torch.inf, -torch.inf):
        values = VALUES.float().clone()
        values[0, 0, 3] = odd
        found = kept.unpacked(kept.packed(values))
        assert not found[0, 0].isfinite().any() and found[1:].isfinite().all()


def test_zeros_are_zeros() -> None:
    kept = KvFormat(torch.float32, "int8")
    assert torch.equal(kept.unpacked(kept.packed(torch.zeros(2, 8))), torch.zeros(2, 8))
    # A fresh line is bytes of zeros.
    assert torch.equal(kept.unpacked(torch.zeros(2, 12, dtype=torch.int8)), torch.zeros(2, 8))
