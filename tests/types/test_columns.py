"""Columns hold what was appended, whatever copies of them do, and copy little."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from everystep.types import Columns

WIDTH = 3


def whole(columns: Columns) -> Tensor:
    return torch.cat([torch.empty(0, WIDTH), *columns.pieces])


@given(st.integers(0, 2**32 - 1))
def test_copies_go_on_separately(seed: int) -> None:
    rng = np.random.default_rng(seed)
    held: list[tuple[Columns, Tensor]] = [(Columns(2), torch.empty(0, WIDTH))]
    for _ in range(40):
        place = int(rng.integers(len(held)))
        columns, wanted = held[place]
        what = rng.integers(4)
        if what == 0 and len(held) < 6:
            held.append((columns.copy(), wanted))
        elif what == 1:
            length = int(rng.integers(len(wanted) + 2))
            columns.rewind(length + 2)
            held[place] = (columns, wanted[:length])
        else:
            more = torch.from_numpy(rng.random((int(rng.integers(1, 70)), WIDTH))).float()
            columns.append(more)
            held[place] = (columns, torch.cat([wanted, more]))
        for one, expected in held:
            assert one.length == len(expected)
            assert torch.equal(whole(one), expected)


@pytest.mark.parametrize("inference", [False, True])
def test_siblings_share_what_they_have_in_common(inference: bool) -> None:
    memory, best = set(), Columns()
    best.append(torch.zeros(10, WIDTH))
    for step in range(1000):
        siblings = [best, best.copy(), best.copy()]
        for rank, one in enumerate(siblings):
            with torch.inference_mode(inference and step % 2 == 0):
                one.append(torch.full((1, WIDTH), float(step + rank)))
        shared = [one.pieces[0] for one in siblings]
        assert len({piece.data_ptr() for piece in shared}) == 1
        memory.add(shared[0].data_ptr())
        best = siblings[step % 3]
    assert best.length == 1010
    assert len(memory) < 10
