"""Ropes turn pairs by their distance only, and stretch frequencies as their papers say."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from everystep.nn.rotary import (
    UNSCALED,
    Dynamic,
    Interpolated,
    Llama3,
    LongRope,
    Rope,
    Scaling,
    Yarn,
    inverse_frequencies,
    rotary_table,
    rotate_,
    section_axes,
    yarn_attention_factor,
)

SCALINGS: list[Scaling] = [
    UNSCALED,
    Interpolated(3.0),
    Interpolated(share=0.5),
    Dynamic(2.0, 8),
    Yarn(4.0, 8, 1.0),
    LongRope((1.0, 1.1, 1.2, 1.3), (2.0, 2.0, 3.0, 4.0), 8, 1.0),
    Llama3(4.0, 1.0, 4.0, 8),
]


def turned(rope: Rope, x: torch.Tensor, positions: list[int], length: int) -> torch.Tensor:
    places = torch.tensor(positions)
    found = x.clone()
    rotate_(found, rotary_table(rope, places, torch.full_like(places, length), x.dtype))
    return found


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: type(one).__name__)
def test_products_depend_on_the_distance_only(scaling: Scaling) -> None:
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    rope = Rope(8, 100.0, scaling)

    def product(i: int, j: int) -> float:
        return float((turned(rope, q, [i], 30) * turned(rope, k, [j], 30)).sum())

    assert product(9, 2) == pytest.approx(product(17, 10), rel=1e-5)


def test_values_beyond_the_rope_stay() -> None:
    x = torch.randn(3, 2, 8)
    found = turned(Rope(4, 100.0, UNSCALED), x, [1, 2, 3], 4)
    assert torch.equal(found[..., 4:], x[..., 4:])
    assert not torch.equal(found[..., :4], x[..., :4])


def test_position_zero_turns_nothing() -> None:
    x = torch.randn(1, 2, 8)
    assert torch.equal(turned(Rope(8, 100.0, UNSCALED), x, [0], 1), x)


def test_llama3_keeps_high_frequencies_and_divides_low_ones() -> None:
    # Worked out by hand for Llama 3.1's parameters and heads of 64.
    found = Llama3(8.0, 1.0, 4.0, 8192).frequencies(64, 5e5, None)
    plain = inverse_frequencies(64, 5e5)
    assert found[14] == plain[14]
    assert float(found[16]) == pytest.approx(5.248462e-4, rel=1e-6)
    assert float(found[18]) == pytest.approx(7.784655e-5, rel=1e-6)


def test_yarn_ramps_between_its_bounds() -> None:
    # Bounds 23 and 40 for heads of 128, base 1e6 and 32768 trained positions.
    found = Yarn(4.0, 32768, 1.0).frequencies(128, 1e6, None)
    plain = inverse_frequencies(128, 1e6)
    assert torch.equal(found[:24], plain[:24])
    assert torch.allclose(found[40:], plain[40:] / 4, rtol=1e-6)
    assert bool((found[24:40] < plain[24:40]).all())


def test_yarn_amplifies_by_the_logarithm_of_its_factor() -> None:
    assert yarn_attention_factor(4.0, None, None) == pytest.approx(1.13863, rel=1e-5)
    assert yarn_attention_factor(0.5, None, None) == 1.0
    both = (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    assert yarn_attention_factor(4.0, 2.0, 1.0) == pytest.approx(both)


@pytest.mark.parametrize("scaling", SCALINGS[3:6:2], ids=lambda one: type(one).__name__)
def test_a_short_row_does_not_feel_a_long_neighbour(scaling: Scaling) -> None:
    alone = scaling.frequencies(8, 100.0, torch.tensor([5]))
    beside = scaling.frequencies(8, 100.0, torch.tensor([5, 50]))
    assert torch.equal(alone[0], beside[0])
    assert not torch.equal(beside[0], beside[1])


def test_the_attention_factor_scales_the_table() -> None:
    places = torch.arange(3)
    plain = rotary_table(Rope(8, 100.0, Yarn(2.0, 8, 1.0)), places, None, torch.float32)
    louder = rotary_table(Rope(8, 100.0, Yarn(2.0, 8, 1.5)), places, None, torch.float32)
    assert torch.allclose(louder.cos, 1.5 * plain.cos)


def test_longrope_changes_after_the_trained_length() -> None:
    scaling = LongRope((1.0,) * 4, (2.0,) * 4, 8, 1.0)
    found = scaling.frequencies(8, 100.0, torch.tensor([8, 9]))
    assert torch.equal(found[0], 2 * found[1])


def test_sections_give_pairs_to_axes() -> None:
    assert section_axes((2, 1, 1), interleaved=False) == (0, 0, 1, 2)
    assert section_axes((2, 1, 1), interleaved=True) == (0, 1, 2, 0)
    # 24 + 20 + 20: by turns twenty times, then the first axis takes the four that remain.
    assert section_axes((24, 20, 20), interleaved=True) == (0, 1, 2) * 20 + (0,) * 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_each_pair_turns_by_its_axis(interleaved: bool) -> None:
    axes = section_axes((2, 1, 1), interleaved=interleaved)
    rope = Rope(8, 100.0, UNSCALED, axes)
    places = torch.tensor([[1, 2], [5, 0], [3, 9]])
    table = rotary_table(rope, places, None, torch.float32)
    plain = [rotary_table(replace(rope, axes=()), row, None, torch.float32) for row in places]
    for pair, axis in enumerate((*axes, *axes)):
        assert torch.equal(table.cos[..., pair], plain[axis].cos[..., pair])
        assert torch.equal(table.sin[..., pair], plain[axis].sin[..., pair])


def test_equal_places_on_all_axes_turn_as_one() -> None:
    rope, places = Rope(8, 100.0, UNSCALED, (0, 1, 2, 0)), torch.arange(5)
    one = rotary_table(rope, places, None, torch.float32)
    three = rotary_table(rope, places.expand(3, -1), None, torch.float32)
    assert torch.equal(one.cos, three.cos) and torch.equal(one.sin, three.sin)
