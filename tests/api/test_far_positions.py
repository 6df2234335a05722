"""Positions that are far away take no memory, and numbers that are none are refused."""

from __future__ import annotations

import pytest
import torch

from everystep.errors import RequestError
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.models import tiny_llama
from everystep.types import Verb
from tests.executors.models import PLAIN, random_model
from tests.executors.works import asking, one_feed

MODEL = tiny_llama()
IDS = torch.tensor([[5, 9, 23, 31, 7, 8, 33], [6, 2, 17, 15, 24, 8, 19]])


@pytest.mark.native
@pytest.mark.parametrize("place", [200_000, 10**7, 2**31 - 1])
def test_a_position_far_away_takes_no_table(place: int) -> None:
    model = random_model(PLAIN, dtype=torch.float32)
    native, judge = NativeExecutor(model), TorchExecutor(model)
    work = one_feed([3, 9, 30], verbs=(Verb("allocate", 0),))
    work = asking(work, positions=torch.tensor([0, 7, place]))
    found, wanted = native.run(work).logits, judge.run(work).logits
    # Far away the angles themselves are as coarse as float32.
    assert torch.allclose(found, wanted, atol=1e-3)
    (table,) = native._tables
    assert len(table._tables[0]) <= 1 << 18


@pytest.mark.parametrize("place", [-1, -(10**9), -(2**31), 2**31, 2**62])
def test_what_is_no_position_is_refused(place: int) -> None:
    positions = torch.arange(7).repeat(2, 1)
    positions[1, 3] = place
    for call in (MODEL.generate, MODEL):
        with pytest.raises(RequestError, match=f"no position.*wanted 0 to 2147483647; got {place}"):
            call(input_ids=IDS, position_ids=positions)
    work = one_feed([3, 9], verbs=(Verb("allocate", 0),))
    work = asking(work, positions=torch.tensor([0, place]))
    for executor in (TorchExecutor, NativeExecutor):
        with pytest.raises(RequestError, match="no position"):
            executor(random_model(PLAIN, dtype=torch.float32)).run(work)
