"""The plain kernels on aarch64 give the bits that they give here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.cache.pasts import kv_of
from everystep.executors.native import NativeExecutor, build, library
from everystep.models import Model, build_gguf_model
from everystep.nn.quantized import Format
from everystep.nn.rounding import Rounding
from everystep.types import StepOutput, Verb
from tests.executors.members import members
from tests.executors.models import SPECS, narrow_model, random_model
from tests.executors.native import (
    test_adapters,
    test_file_blocks,
    test_recurrent,
    test_sixteen_bits,
)
from tests.executors.native.emulated import EmulatedLibrary, build_program
from tests.executors.native.test_encoder_decoders import model_of, works_of
from tests.executors.works import Wanderer, one_feed
from tests.models.test_quantised import FILES, written

pytestmark = pytest.mark.native

Open = Callable[..., NativeExecutor]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedLibrary]:
    """The plain library for aarch64, compiled once for all workers of a run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    running = EmulatedLibrary(build_program(folder / "aarch64-program"))
    yield running
    running.close()


@pytest.fixture
def open_there(emulated: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Executors on aarch64."""
    return partial(opened, emulated, monkeypatch)


@pytest.fixture
def open_here(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Executors on this processor with the same kernels."""
    plain = library.open_library(build.library_path("plain"))
    return partial(opened, plain, monkeypatch)


def opened(
    loaded: object,
    monkeypatch: pytest.MonkeyPatch,
    model: Model,
    cache_dtype: CacheDtype | None = None,
) -> NativeExecutor:
    with monkeypatch.context() as patch:
        patch.setattr(library, "load", lambda: loaded)
        return NativeExecutor(model, cache_dtype)


def outputs(found: StepOutput) -> Iterator[Tensor]:
    yield found.logits
    yield from (one.hidden for one in found.answers.values() if one.hidden is not None)


def compare(model: Model, here: NativeExecutor, there: NativeExecutor) -> None:
    """The same works on both, with rows of any history."""
    wanderer, seen = Wanderer(model, np.random.default_rng(7), True, longest=60, most=20), 0
    for _ in range(5):
        work = wanderer.work()
        for wanted, found in zip(outputs(here.run(work)), outputs(there.run(work)), strict=True):
            assert torch.equal(found, wanted)
            seen += wanted.numel()
    assert seen and here.audit() == there.audit()


@pytest.mark.parametrize("name", SPECS)
def test_every_specification_gives_the_same_bits(
    name: str, open_here: Open, open_there: Open
) -> None:
    model = random_model(SPECS[name], dtype=torch.float32)
    compare(model, open_here(model), open_there(model))


@pytest.mark.parametrize("format", test_file_blocks.BITS)
def test_codes_of_all_lengths_give_the_same_bits(
    format: Format, open_here: Open, open_there: Open
) -> None:
    model = test_file_blocks.model_of(format)
    compare(model, open_here(model), open_there(model))


@pytest.mark.parametrize("dtype", test_sixteen_bits.TYPES, ids=str)
def test_weights_of_16_bits_give_the_same_bits(
    dtype: torch.dtype, open_here: Open, open_there: Open
) -> None:
    model, _ = test_sixteen_bits.held_in(dtype, "qwen2")
    compare(model, open_here(model), open_there(model))


@pytest.mark.parametrize("rounding", [None, "int4"])
def test_adapters_give_the_same_bits(
    rounding: Rounding | None, open_here: Open, open_there: Open
) -> None:
    model = narrow_model("llama", rounding)
    work = test_adapters.work_of(model, test_adapters.MIXES, [3, 1] * 8)
    assert torch.equal(open_there(model).run(work).logits, open_here(model).run(work).logits)


@pytest.mark.parametrize("name", ["t5, gated", "bart", "whisper"])
def test_encoder_states_are_looked_at(name: str, open_here: Open, open_there: Open) -> None:
    model = model_of(name)
    here, there = open_here(model), open_there(model)
    for work in works_of(model, seed=2, steps=4):
        assert torch.equal(there.run(work).logits, here.run(work).logits)


@pytest.mark.parametrize("name", ["plain", "odd sizes"])
def test_states_are_kept_and_taken_over(name: str, open_here: Open, open_there: Open) -> None:
    model = test_recurrent.model_of(name)
    here, there = open_here(model), open_there(model)
    wanderer = Wanderer(model, np.random.default_rng(4), False, 60, 20, False)
    for _ in range(4):
        work = wanderer.work()
        assert torch.equal(there.run(work).logits, here.run(work).logits)
    row, length = next((row, n) for row, n in here.audit().items() if n)
    past = here.export(row)
    for layers in zip(there.export(row).layers, past.layers, strict=True):
        assert all(map(torch.equal, *layers))
    wanted = here.run(one_feed([7, 8], row=row, start=length)).logits
    follow = one_feed([7, 8], row=9, start=length, verbs=(Verb("allocate", 9),))
    assert torch.equal(there.run(replace(follow, pasts={9: past})).logits, wanted)


@pytest.mark.parametrize("rounding", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_rounded_weights_give_the_same_bits(
    name: str, rounding: str, open_here: Open, open_there: Open
) -> None:
    model = narrow_model(name, rounding)
    compare(model, open_here(model), open_there(model))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_blocks_of_files_give_the_same_bits(
    name: str, open_here: Open, open_there: Open, tmp_path: Path
) -> None:
    model = build_gguf_model(written(tmp_path, "llama", FILES[name]))
    compare(model, open_here(model), open_there(model))


@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("name", ["plain", "window"])
def test_narrow_rows_give_the_same_bits(
    name: str, cache_dtype: CacheDtype, open_here: Open, open_there: Open
) -> None:
    model = random_model(SPECS[name], dtype=torch.float32)
    compare(model, open_here(model, cache_dtype), open_there(model, cache_dtype))


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_there_give_the_same_bits(threads: int, open_here: Open, open_there: Open) -> None:
    model = narrow_model("llama", "int4")
    here = open_here(model)
    with members(threads):
        compare(model, here, open_there(model))


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_rows_are_taken_over_between_processors(
    cache_dtype: CacheDtype, open_here: Open, open_there: Open
) -> None:
    model, tokens = random_model(SPECS["plain"], dtype=torch.float32), list(range(20))
    here, there = open_here(model, cache_dtype), open_there(model, cache_dtype)
    for executor in (here, there):
        executor.run(one_feed(tokens, verbs=(Verb("allocate", 0),)))
    past = here.export(0)
    assert torch.equal(kv_of(there.export(0)), kv_of(past))
    follow = one_feed([7, 8], row=1, start=20, verbs=(Verb("allocate", 1),))
    follow = replace(follow, pasts={1: past})
    wanted = here.run(one_feed([7, 8], start=20)).logits
    assert torch.equal(open_there(model, cache_dtype).run(follow).logits, wanted)
