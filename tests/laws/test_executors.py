"""The same laws on tiny decoders: in float64, where sums may differ in their last bits only, and on
the native executor in float32 and in codes, where no bit may differ.

Positions of several axes and encoder states are the hash model's alone; all else stays in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from everystep.cache.formats import CacheDtype
from everystep.engine import Contrast, DoLa, DraftModel, OtherDraftModel, Tokenizers
from everystep.executors.base import Executor
from everystep.executors.choice import open_executor
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, convert_model
from everystep.nn.rounding import Rounding
from everystep.testing.hash_model import HashExecutor
from everystep.testing.tokenizer import Letters
from everystep.types import Prompt, Request
from everystep.types.protocols import Readout
from everystep.types.request import Drafter
from tests.executors.models import family_model, narrow_model
from tests.judges.laws import Laws
from tests.judges.mixes import Mix, random_mix
from tests.judges.numpy_executor import NumpyExecutor

WIDTH = 32
MIXES = 5
BLOCKS = [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 6))]


def for_decoder(mix: Mix, width: int = WIDTH) -> Mix:
    """The mix with prompts that a decoder of this width can read."""
    requests = (_readable(request, mix.seed, width) for request in mix.requests)
    return replace(mix, requests=tuple(requests))


def _readable(request: Request, seed: int, width: int) -> Request:
    return replace(
        request,
        prompt=_flat(request.prompt, seed, width),
        companions=tuple(_flat(prompt, seed, width) for prompt in request.companions),
        drafter=_drafter(request),
        readout=_readout(request.readout),
    )


def _drafter(request: Request) -> Drafter | None:
    """Draft models with the vocabulary of the decoder."""
    if isinstance(request.drafter, DraftModel):
        return DraftModel(partial(HashExecutor, 40), request.drafter.tokens)
    if isinstance(request.drafter, OtherDraftModel):
        opened, tokenizers = (
            partial(HashExecutor, 42),
            Tokenizers(Letters(40), Letters(42, 1), 2, 2),
        )
        return replace(request.drafter, open=opened, tokenizers=tokenizers)
    return request.drafter


def _readout(readout: Readout | None) -> Readout | None:
    """Layers that a decoder of two has, amateurs with its vocabulary."""
    if isinstance(readout, Contrast):
        return replace(readout, open=partial(HashExecutor, 40, 3))
    if isinstance(readout, DoLa):
        return DoLa(tuple(dict.fromkeys(layer % 2 for layer in readout.layers)), readout.then)
    return readout


def _flat(prompt: Prompt, seed: int, width: int) -> Prompt:
    embeds, positions = prompt.embeds, prompt.positions
    if embeds is not None:
        drawn = np.random.default_rng(seed).standard_normal((prompt.length, width))
        embeds = torch.from_numpy(drawn)
    if positions is not None:
        positions = positions.reshape(-1, positions.shape[-1])[0]
    return Prompt(prompt.ids, embeds, positions)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Model:
    """A tiny model with random weights, in float64."""
    return family_model(request.param)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("executor", [TorchExecutor, NumpyExecutor])
def test_the_laws_hold(model: Model, executor: Callable[[Model], Executor], block: int) -> None:
    check(executor, model, block)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", ["mistral", "mamba"])
def test_the_laws_hold_where_rows_forget(name: str, block: int) -> None:
    config = {"sliding_window": 5} if name == "mistral" else {"state_size": 4}
    model = family_model(name, **config)
    laws = Laws(lambda mix, max_rows: TorchExecutor(model))
    for seed in range(block * MIXES, (block + 1) * MIXES):
        mix = for_decoder(random_mix(seed))
        laws.check(mix if model.has_positions else without_positions(mix))


def without_positions(mix: Mix) -> Mix:
    """The mix with prompts whose positions are nobody's choice."""
    requests = (
        replace(
            request,
            prompt=replace(request.prompt, positions=None),
            companions=tuple(replace(one, positions=None) for one in request.companions),
        )
        for request in mix.requests
    )
    return replace(mix, requests=tuple(requests))


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
def test_the_laws_hold_in_narrow_rows(model: Model, cache_dtype: CacheDtype) -> None:
    check(partial(TorchExecutor, cache_dtype=cache_dtype), model, 0)


@pytest.mark.native
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("rounding", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_the_laws_hold_natively(name: str, rounding: Rounding | None, block: int) -> None:
    check(NativeExecutor, narrow_model(name, rounding), block)


def check(executor: Callable[[Model], Executor], model: Model, block: int) -> None:
    """Every law on the mixes of a block."""
    laws = Laws(lambda mix, max_rows: executor(model))
    for seed in range(block * MIXES, (block + 1) * MIXES):
        laws.check(for_decoder(random_mix(seed)))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "mamba"])
def test_the_laws_hold_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    config = {"mistral": {"sliding_window": 5}, "mamba": {"state_size": 4}}.get(name, {})
    model = convert_model(family_model(name, **config), device="cuda", dtype=dtype)
    counts = []

    def executor(mix: Mix, max_rows: int) -> Executor:
        opened = open_executor(model)
        assert isinstance(opened, TorchExecutor)
        counts.append(opened.captures)
        return opened

    laws = Laws(executor, error=1e-4)
    for seed in range(MIXES):
        mix = for_decoder(random_mix(seed))
        laws.check(mix if model.has_positions else without_positions(mix))
    # Recurrent layers are not captured.
    replayed = sum(one.replayed for one in counts)
    assert replayed == 0 if name == "mamba" else replayed > 50
