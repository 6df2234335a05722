"""Packs hold each row once, as best fit decreasing places them, and cut none."""

from __future__ import annotations

import random

import pytest

import everystep as es
from everystep.errors import RequestError, UnsupportedError


def textbook(lengths: list[int], most: int) -> list[list[int]]:
    """Best fit decreasing, by looking at each pack each time."""
    packs: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        rooms = [most - sum(lengths[one] for one in pack) for pack in packs]
        fitting = [(room, place) for place, room in enumerate(rooms) if room >= lengths[row]]
        if fitting:
            packs[min(fitting)[1]].append(row)
        else:
            packs.append([row])
    return sorted(sorted(pack) for pack in packs)


@pytest.mark.parametrize("seed", range(30))
def test_packs_are_those_of_the_textbook(seed: int) -> None:
    draw = random.Random(seed)
    most = draw.randint(5, 60)
    lengths = [draw.randint(1, most) for _ in range(draw.randint(0, 120))]
    packs = es.pack_rows(lengths, most)
    assert packs == textbook(lengths, most)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    sums = [sum(lengths[row] for row in pack) for pack in packs]
    assert all(total <= most for total in sums)


def test_fifty_thousand_rows_are_packed_at_once() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 1024) for _ in range(50_000)]
    packs = es.pack_rows(lengths, 1024)
    assert len(packs) <= 1.01 * sum(lengths) / 1024 + 1


@pytest.mark.parametrize("strategy", ["wrapped", "bfd_split"])
def test_strategies_that_cut_documents_are_refused_with_their_reason(strategy: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{strategy}' is not here: it .*'bfd'"):
        es.pack_rows([1, 2], 4, strategy)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([5], 4), "row 0 is longer than a pack"),
        (([1, 0], 4), "row 1 has no length"),
        (([1, 2.5], 4), "row 1 has no length"),
        (([1], 0), "max_length"),
        (([1], 4, "ffd"), "packing_strategy is unknown"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments: tuple, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        es.pack_rows(*arguments)
