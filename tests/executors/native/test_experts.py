"""Experts natively: only those that rows chose are read, and no row's bits depend on another."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.executors.native import NativeExecutor, read_rows
from everystep.executors.native.program import program_of
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model, stored_weights
from everystep.models.decoder import Decoder
from everystep.models.loader import HeldWeights
from everystep.nn.linear import Linear, Rows, dense
from everystep.nn.panels import Panels
from everystep.nn.quantized import BLOCK, QuantizedWeight
from everystep.types import Verb, Work
from tests.executors.members import members
from tests.executors.models import SPECS, narrow_model, random_model
from tests.executors.works import one_feed

pytestmark = pytest.mark.native
FAMILIES = ("mixtral", "qwen3_moe")
FORMATS = ("float32", "int8", "int4", "q8_0", "q4_0")
OPEN = (Verb("allocate", 0),)


def in_file_blocks(weight: Tensor, format: str) -> QuantizedWeight:
    """A matrix as GGUF files hold it."""
    blocks = weight.float().view(len(weight), -1, BLOCK)
    if format == "q8_0":
        scales = (blocks.abs().amax(2) / 127).half()
        codes = (blocks / scales[..., None]).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight("q8_0", codes.flatten(1), scales)
    scales = (blocks.abs().amax(2) / 7).half()
    whole = ((blocks / scales[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    codes = whole[..., : BLOCK // 2] | whole[..., BLOCK // 2 :] << 4
    return QuantizedWeight("q4_0", codes.flatten(1), scales)


@cache
def model_of(family: str, format: str) -> Model:
    """A tiny model whose weights lie in panels."""
    if format not in ("q8_0", "q4_0"):
        rounding = None if format == "float32" else format
        return narrow_model(family, rounding, panels=True)  # type: ignore[arg-type]
    plain = narrow_model(family, None, panels=True)
    weights: dict[str, Rows] = {
        name: in_file_blocks(weight, format)
        if isinstance(weight, Tensor) and "expert" in name
        else weight
        for name, weight in stored_weights(plain)
    }
    held, config = HeldWeights(weights), plain.config.to_dict()
    return build_model(config, held, kept=held.quantised, in_panels=lambda spec: read_rows)


def fed(executor: NativeExecutor, tokens: list[int], sizes: list[int]) -> Tensor:
    """(T, V) logits of row 0, which is fed in pieces of these sizes."""
    start, logits = 0, []
    for size in sizes:
        piece = tokens[start : start + size]
        work = one_feed(piece, start=start, verbs=OPEN if start == 0 else ())
        logits.append(executor.run(work).logits)
        start += size
    return torch.cat(logits)


def alone(model: Model, tokens: list[int]) -> Tensor:
    return fed(NativeExecutor(model), tokens, [len(tokens)])


def choices(model: Model, tokens: list[int]) -> list[list[set[int]]]:
    """Which experts torch operators choose: of each layer that has some, of each position."""
    found: list[list[set[int]]] = []
    decoder = cast(Decoder, model.network)
    kind = type(next(layer.experts for layer in decoder.layers if layer.experts is not None))
    choose = kind.choose

    def noted(*given: object, **named: bool) -> tuple[Tensor, Tensor]:
        shares, numbers = choose(*given, **named)  # type: ignore[arg-type]
        found.append([{*row} for row in numbers.tolist()])
        return shares, numbers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "choose", noted)
        TorchExecutor(model).run(one_feed(tokens, verbs=OPEN))
    return found


def ids(seed: int, count: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 40, count).tolist()
    return found


# --- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 7, 40, 300])
def test_logits_are_those_of_torch_operators(family: str, count: int) -> None:
    model, tokens = model_of(family, "float32"), ids(count, count)
    wanted = TorchExecutor(model).run(one_feed(tokens, verbs=OPEN)).logits
    found = alone(model, tokens)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("format", FORMATS[1:])
def test_logits_of_codes_are_those_of_torch_operators(family: str, format: str) -> None:
    """But where an activation lies between two codes, or a row between two experts."""
    model, near = model_of(family, format), 0
    for seed in range(30):
        tokens = ids(seed, 5)
        wanted = TorchExecutor(model).run(one_feed(tokens, verbs=OPEN)).logits
        found = alone(model, tokens)
        near += int(((found - wanted).abs().amax(1) <= 1e-5 * wanted.abs().max()).sum())
    assert near >= 0.9 * 30 * 5


def test_of_equal_experts_the_first_are_chosen() -> None:
    """So nothing depends on the others."""
    model = random_model(SPECS["experts"], dtype=torch.float32)
    decoder = cast(Decoder, model.network)
    first, *others = decoder.layers
    assert first.experts is not None
    undecided = Linear(torch.zeros_like(dense(first.experts.router.matrix())))
    found = []
    for without in (5, 1):
        down = list(first.experts.down)
        down[without] = Linear(torch.zeros_like(dense(down[without].matrix())))
        experts = replace(first.experts, router=undecided, down=tuple(down))
        layers = (replace(first, experts=experts), *others)
        changed = replace(model, network=replace(decoder, layers=layers))
        found.append(alone(changed, [3, 9]))
    one, other = found
    plain = replace(first.experts, router=undecided)
    layers = (replace(first, experts=plain), *others)
    wanted = alone(replace(model, network=replace(decoder, layers=layers)), [3, 9])
    assert torch.equal(one, wanted) and not torch.equal(other, wanted)


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [[1], [9], [4, 1, 1, 3], [300]])
def test_experts_that_no_row_chose_are_not_read(family: str, sizes: list[int]) -> None:
    model, tokens = model_of(family, "float32"), ids(1, sum(sizes))
    executor = NativeExecutor(model, ahead=False)
    fed(executor, tokens, sizes)
    wanted, start = 0, 0
    for size in sizes:
        # A long feed is computed in parts of 256 positions.
        for first in range(start, start + size, 256):
            last = min(first + 256, start + size)
            for layer in choices(model, tokens):
                wanted += len(set().union(*layer[first:last]))
        start += size
    assert executor.experts_read() == wanted


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_follows_from_what_others_hold(format: str) -> None:
    """Experts that no row chose may hold anything."""
    model, tokens = model_of("mixtral", format), ids(2, 1)
    wanted, chosen = alone(model, tokens), choices(model, tokens)
    changed = []
    for layer, taken in zip(cast(Decoder, model.network).layers, chosen, strict=True):
        assert layer.experts is not None
        for maps in (layer.experts.up, layer.experts.down):
            for number, one in enumerate(maps):
                panels = one.matrix()
                assert isinstance(panels, Panels)
                if number not in taken[0]:
                    changed.append((panels.data, panels.data.clone()))
    assert changed
    for data, _ in changed:
        data.fill_(255)
    assert torch.equal(alone(model, tokens), wanted)
    for data, before in changed:
        data.copy_(before)


@pytest.mark.parametrize("format", FORMATS)
def test_experts_are_held_once(format: str) -> None:
    assert program_of(model_of("qwen3_moe", format)).arena.bytes == 0


# --- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6)
def test_no_bit_depends_on_how_many_tokens_are_fed_at_once(format: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, 45), rng.integers(0, 12), replace=False))
    sizes = np.diff([0, *cuts, 45]).tolist()
    model, tokens = model_of(FAMILIES[seed % 2], format), ids(seed, 45)
    assert torch.equal(fed(NativeExecutor(model), tokens, sizes), alone(model, tokens))


@pytest.mark.parametrize("format", FORMATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=4)
def test_no_bit_depends_on_rows_beside(format: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, rows = model_of(FAMILIES[seed % 2], format), int(rng.integers(2, 30))
    own = [rng.integers(0, 40, int(rng.integers(1, 25))) for _ in range(rows)]
    counts = np.array([len(one) for one in own])
    verbs = tuple(Verb("allocate", row) for row in range(rows))
    starts = np.zeros(rows, dtype=np.int64)
    work = Work(verbs, np.arange(rows), starts, counts, counts, np.concatenate(own))
    found = NativeExecutor(model).run(work).logits.split(counts.tolist())
    for tokens, logits in zip(own, found, strict=True):
        assert torch.equal(logits, alone(model, tokens.tolist()))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("threads", [2, 3])
def test_no_bit_depends_on_the_number_of_threads(family: str, threads: int) -> None:
    model, tokens = model_of(family, "int8"), ids(3, 320)
    wanted = alone(model, tokens)
    with members(threads):
        executor = NativeExecutor(model)
    assert torch.equal(fed(executor, tokens, [300, 1, 2, 17]), wanted)
