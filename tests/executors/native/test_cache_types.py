"""Keys and values in float16 and in codes: what rows keep, and that nothing else changes a bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import kv_of, past_of
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.nn.rounding import Rounding
from everystep.types import Past, Verb, Work
from tests.executors.members import members
from tests.executors.models import SPECS, narrow_model, random_model
from tests.executors.works import Wanderer, both_hold, forgets, ints, one_feed

pytestmark = pytest.mark.native
SPECIFICATIONS = ("plain", "window", "capped scores", "biases", "normed heads", "partial rope")
each_type = pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
ALLOCATE, OTHER = (Verb("allocate", 0),), (Verb("allocate", 1),)
TOKENS = np.random.default_rng(2).integers(0, 40, 150).tolist()


@cache
def model_of(name: str) -> Model:
    return random_model(SPECS[name], dtype=torch.float32)


@each_type
@pytest.mark.parametrize("name", SPECIFICATIONS)
def test_rows_are_the_judges(name: str, cache_dtype: CacheDtype) -> None:
    """A number at a rounding boundary may go either way where sums differ in their last bit, and
    what looks at it differs then a little. Rows that hold the same are within 1e-5."""
    model, far = model_of(name), {True: [0.0], False: [0.0]}
    for seed in range(8):
        wanderer = Wanderer(model, np.random.default_rng(seed), False, 40, 9, not forgets(model))
        native, judge = NativeExecutor(model, cache_dtype), TorchExecutor(model, None, cache_dtype)
        for _ in range(6):
            work = wanderer.work()
            found, wanted = native.run(work).logits, judge.run(work).logits
            if not len(found):
                continue
            away = (found - wanted).abs().amax(1) / wanted.abs().max()
            parts = away.split(work.logits.tolist())
            for row, part in zip(work.rows.tolist(), parts, strict=True):
                alike = both_hold(native.export(row), judge.export(row), rtol=1e-5)
                far[alike] += part.tolist()
    assert len(far[True]) > 50 and max(far[True]) <= 1e-5
    assert max(far[False]) <= {"float16": 5e-4, "int8": 5e-3}[cache_dtype]


def exported(executor: NativeExecutor | TorchExecutor) -> Past:
    """Forty positions of a row, which goes on."""
    executor.run(one_feed(TOKENS[:40], verbs=ALLOCATE))
    return executor.export(0)


@each_type
def test_rows_hold_what_the_judge_holds(cache_dtype: CacheDtype) -> None:
    model = model_of("plain")
    exact = kv_of(exported(TorchExecutor(model)))
    found = kv_of(exported(NativeExecutor(model, cache_dtype)))[0, :, :, 0]
    wanted = kv_of(exported(TorchExecutor(model, None, cache_dtype)))[0, :, :, 0]
    # What the first layer says of the first position is the same on both but for its last bits.
    assert torch.allclose(found, wanted, rtol=1e-6)
    assert not torch.allclose(found, exact[0, :, :, 0], rtol=1e-6)


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_numbers_are_rounded_as_torch_rounds_them(cache_dtype: CacheDtype) -> None:
    """Subnormals, ties, the largest, and what is beyond, given to both as a past."""
    spread = torch.randn(2, 2, 2, 40, 8) * 10.0 ** torch.randint(-9, 5, (2, 2, 2, 40, 1))
    spread[0, 0, 0, 0] = torch.tensor([65504.0, 65519.0, 65520.0, 70000.0, 2**-24, 2**-25, 0, 1e-9])
    spread[0, 0, 0, 1] = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 2**-14, 2**-14 - 2**-25] * 2)
    spread[0, 0, 0, 2] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1, 2, 3, 4, 5])
    spread[0, 0, 0, 3] = -0.0
    held = []
    for executor in (
        NativeExecutor(model_of("plain"), cache_dtype),
        TorchExecutor(model_of("plain"), None, cache_dtype),
    ):
        past = past_of(spread)
        executor.run(replace(one_feed([5], row=1, start=40, verbs=OTHER), pasts={1: past}))
        held.append(kv_of(executor.export(1))[:, :, :, :40])
    assert torch.equal(held[0].isnan(), held[1].isnan())
    assert torch.equal(held[0].nan_to_num(), held[1].nan_to_num())


@each_type
def test_what_is_exported_is_what_is_held(cache_dtype: CacheDtype) -> None:
    model = model_of("plain")
    executor = NativeExecutor(model, cache_dtype)
    past = exported(executor)
    wanted = executor.run(one_feed(TOKENS[40:60], start=40)).logits
    other = NativeExecutor(model, cache_dtype)
    follow = one_feed(TOKENS[40:60], row=1, start=40, verbs=OTHER)
    assert torch.equal(other.run(replace(follow, pasts={1: past})).logits, wanted)
    assert torch.equal(kv_of(other.export(1)), kv_of(executor.export(0)))


# --- the same bits --------------------------------------------------------------------------------


def alone(model: Model, cache_dtype: CacheDtype, tokens: list[int], sizes: list[int]) -> Tensor:
    """(T, V) logits of a row that is fed in pieces of the given sizes."""
    executor, start, logits = NativeExecutor(model, cache_dtype), 0, []
    for size in sizes:
        verbs = () if start else ALLOCATE
        piece = one_feed(tokens[start : start + size], start=start, verbs=verbs)
        logits.append(executor.run(piece).logits)
        start += size
    return torch.cat(logits)


@each_type
def test_no_bit_depends_on_chunks(cache_dtype: CacheDtype) -> None:
    for rounding in (None, "int8"):
        model = narrow_model("llama", rounding)
        whole = alone(model, cache_dtype, TOKENS, [150])
        for sizes in ([1] * 150, [60, *[1] * 30, 60], [7, 90, 53]):
            assert torch.equal(alone(model, cache_dtype, TOKENS, sizes), whole)


@each_type
@pytest.mark.parametrize("rounding", [None, "int4"])
def test_no_bit_depends_on_rows_beside_or_on_shared_pages(
    rounding: Rounding | None, cache_dtype: CacheDtype
) -> None:
    model, own = narrow_model("qwen2", rounding), [9, 1, 25, 16]
    executor = NativeExecutor(model, cache_dtype)
    executor.run(one_feed(TOKENS[:37], verbs=ALLOCATE))
    forks = tuple(Verb("fork", row, 0) for row in range(1, 4))
    starts, counts = ints(37, 37, 37, 37), ints(*own)
    tokens = np.concatenate([TOKENS[40 + row :][:count] for row, count in enumerate(own)])
    found = executor.run(Work(forks, ints(*range(4)), starts, counts, counts, tokens)).logits
    for row, (count, logits) in enumerate(zip(own, found.split(own), strict=True)):
        whole = [*TOKENS[:37], *TOKENS[40 + row :][:count]]
        assert torch.equal(logits, alone(model, cache_dtype, whole, [37 + count])[37:])


@each_type
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_who_attends_to_which_span(threads: int, cache_dtype: CacheDtype) -> None:
    model = model_of("plain")
    with members(threads):
        found = alone(model, cache_dtype, TOKENS, [60, *[1] * 20, 50, *[1] * 20])
    assert torch.equal(found, alone(model, cache_dtype, TOKENS, [150]))
