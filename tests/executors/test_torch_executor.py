"""On torch, rows give the logits of a plain forward over everything that they have read."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.errors import RequestError
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, convert_model
from everystep.types import Extra, Prompt, StepOutput, Verb, Work
from tests.executors.models import SPECS, family_model, random_model
from tests.executors.works import (
    Wanderer,
    answer,
    asking,
    embedded,
    expected_logits,
    ints,
    one_feed,
    only_verbs,
    read,
)
from tests.models.tiny import ours, reference_pair

IDS = [3, 9, 30, 4, 4, 17, 25, 6, 1, 39, 12, 8, 22, 5]
OPEN = Verb("allocate", 0)


@cache
def model_of(name: str) -> Model:
    return random_model(SPECS[name])


def assert_near(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-9)


def wander(wanderer: Wanderer, steps: int = 10, **wants: Any) -> None:
    """Works, each with the right logits and the right rows after it; then all rows are freed."""
    executor = TorchExecutor(wanderer.model)
    for _ in range(steps):
        work = asking(wanderer.work(), **wants) if wants else wanderer.work()
        output = executor.run(work)
        assert_near(output.logits, expected_logits(wanderer.model, work, wanderer.histories))
        held = {row: len(history.positions) for row, history in wanderer.histories.items()}
        assert executor.audit() == held
    executor.run(only_verbs(*(Verb("free", row) for row in wanderer.histories)))
    assert executor.audit() == {}


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [1, 7, 30])
@pytest.mark.parametrize("name", ["plain", "window", "capped scores"])
@given(seed=st.integers(0, 2**32 - 1), positions=st.booleans())
@settings(max_examples=15)
def test_rows_hold_what_they_have_read(name: str, most: int, seed: int, positions: bool) -> None:
    rng = np.random.default_rng(seed)
    anywhere = name != "window"
    wander(Wanderer(model_of(name), rng, positions, 4 * most + 20, most, anywhere))


@pytest.mark.parametrize("most", [1, 7, 30])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_states_are_those_of_what_was_read(most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    wander(Wanderer(mamba(), rng, False, 4 * most + 20, most, anywhere=False))


@cache
def mamba() -> Model:
    return family_model("mamba", state_size=4)


@pytest.mark.parametrize("name", SPECS)
def test_every_specification(name: str) -> None:
    if SPECS[name].layers[0].rope and SPECS[name].layers[0].rope.scaling.by_length:  # type: ignore[union-attr]
        wander(Wanderer(model_of(name), np.random.default_rng(5), False, longest=16))
    else:
        wander(Wanderer(model_of(name), np.random.default_rng(5), False, 60, 20, False))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_weights_and_layers_change_no_logits(seed: int) -> None:
    wanderer = Wanderer(model_of("window"), np.random.default_rng(seed), False, 60, 20, False)
    wander(wanderer, attentions=True, layers=True)


def test_attentions_and_layers_are_those_of_a_plain_forward() -> None:
    executor = TorchExecutor(model_of("window"))
    executor.run(one_feed(IDS[:5], verbs=(OPEN,)))
    work = asking(one_feed(IDS[5:14], start=5), layers=True, attentions=True)
    found = answer(executor.run(work))
    watched = read(model_of("window"), IDS[:14]).watched(model_of("window"))
    assert_near(torch.stack(found.layers), torch.stack(watched.layers)[:, 5:])
    assert_near(torch.stack(found.attentions), torch.stack(watched.attentions)[:, :, 5:])


def test_layers_are_those_of_each_feed() -> None:
    verbs = (OPEN, Verb("allocate", 1))
    rows = [IDS[:12], IDS[:3]]
    counts = ints(12, 3)
    work = Work(verbs, ints(0, 1), ints(0, 0), counts, counts, ints(*IDS[:12], *IDS[:3]))
    output = TorchExecutor(model_of("plain")).run(asking(work, layers=True, attentions=True))
    for f, ids in enumerate(rows):
        watched, found = read(model_of("plain"), ids).watched(model_of("plain")), answer(output, f)
        assert_near(torch.stack(found.layers), torch.stack(watched.layers))
        assert_near(torch.stack(found.attentions), torch.stack(watched.attentions))


@pytest.mark.parametrize("count", [1, 5, 10])
def test_hidden_states_are_those_of_the_fed_positions(count: int) -> None:
    executor = TorchExecutor(model_of("plain"))
    executor.run(one_feed(IDS[:4], verbs=(OPEN,)))
    verbs = (Verb("fork", 1, 0), Verb("allocate", 2))
    ids = IDS[4 : 4 + count]
    counts = ints(12, 1, count)
    work = Work(
        verbs, ints(2, 0, 1), ints(0, 4, 4), counts, ints(1, 1, 0), ints(*IDS[:12], 7, *ids),
        {2: Extra(hidden=True)},
    )  # fmt: skip
    output = executor.run(work)
    states = read(model_of("plain"), IDS[: 4 + count]).watched(model_of("plain")).layers[-1]
    assert_near(answer(output, 2).hidden, states[4:])
    assert output.answers.keys() == {2}


def test_a_neighbour_with_infinities_does_not_leak() -> None:
    executor = TorchExecutor(model_of("plain"))
    poison = torch.full((12, 32), torch.inf, dtype=torch.float64)
    bad = replace(one_feed([-1] * 12, verbs=(OPEN,)), extras={0: embedded(0, poison)})
    assert not bool(executor.run(bad).logits.isfinite().all())
    verbs = (Verb("free", 0), OPEN, Verb("allocate", 1))
    work = Work(verbs, ints(0, 1), ints(0, 0), ints(2, 7), ints(2, 7), ints(*IDS[:9]))
    expected = [
        read(model_of("plain"), ids).logits(model_of("plain")) for ids in (IDS[:2], IDS[2:9])
    ]
    assert_near(executor.run(work).logits, torch.cat(expected))


def test_a_prompt_is_stored_once_for_all_its_forks() -> None:
    executor = TorchExecutor(model_of("plain"))
    prompt = (IDS * 3)[:40]
    executor.run(one_feed(prompt, verbs=(OPEN,)))
    verbs = tuple(Verb("fork", row, 0) for row in range(1, 4))
    rows, ones = ints(*range(4)), ints(1, 1, 1, 1)
    output = executor.run(Work(verbs, rows, ones * 40, ones, ones, ints(1, 2, 3, 4)))
    expected = [
        read(model_of("plain"), [*prompt, t]).logits(model_of("plain"))[-1:] for t in (1, 2, 3, 4)
    ]
    assert_near(output.logits, torch.cat(expected))
    counts = executor.cache.counts
    assert (counts.forks, counts.freezes, counts.tail_copies) == (3, 1, 0)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_chains_of_several_segments(name: str) -> None:
    executor, model = TorchExecutor(model_of(name)), model_of(name)
    ids = np.random.default_rng(0).integers(0, 40, 160).tolist()
    executor.run(one_feed(ids[:20], verbs=(OPEN,)))
    executor.run(one_feed(ids[20:157], row=1, start=20, verbs=(Verb("fork", 1, 0),)))
    executor.run(one_feed(ids[157:158], row=1, start=157, verbs=(Verb("fork", 2, 1),)))
    rows, starts, ones = ints(0, 1, 2), ints(20, 158, 157), ints(1, 2, 1)
    tokens = ints(ids[20], *ids[158:160], ids[157])
    found = executor.run(Work((), rows, starts, ones, ones, tokens)).logits
    whole = read(model, ids).logits(model)
    banks = 1 if name == "plain" else 2
    assert executor.cache.counts.freezes == 2 * banks
    assert_near(found, whole[[20, 158, 159, 157]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_logits_are_float32_or_wider(dtype: torch.dtype) -> None:
    model = random_model(SPECS["plain"], dtype=dtype)
    output = TorchExecutor(model).run(one_feed(IDS, verbs=(OPEN,)))
    assert output.logits.dtype == torch.float32
    assert bool(output.logits.isfinite().all())
    assert TorchExecutor(model).run(only_verbs()).logits.dtype == torch.float32


def test_logits_come_only_where_they_are_wanted() -> None:
    work = replace(one_feed(IDS, verbs=(OPEN,)), logits=ints(2))
    found = TorchExecutor(model_of("plain")).run(work).logits
    assert_near(found, read(model_of("plain"), IDS).logits(model_of("plain"))[-2:])


def test_several_positions_per_input_are_refused() -> None:
    work = asking(one_feed([1, 2], verbs=(OPEN,)), positions=torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(RequestError, match="one position per token"):
        TorchExecutor(model_of("plain")).run(work)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["plain", "rope dynamic", "rope longrope", "window"])
def test_an_accelerator_gives_the_same(name: str) -> None:
    here, there = model_of(name), convert_model(model_of(name), device="cuda")
    executors = [TorchExecutor(here), TorchExecutor(there)]
    fork = (Verb("fork", 1, 0), Verb("truncate", 1, 12))
    works = [
        one_feed((IDS * 2)[:20], verbs=(OPEN,)),
        Work(fork, ints(1, 0), ints(12, 20), ints(1, 2), ints(1, 2), ints(4, 5, 6)),
        Work((), ints(0, 1), ints(22, 13), ints(1, 9), ints(1, 9), ints(*IDS[:10])),
    ]
    for work in works:
        expected, found = (executor.run(work).logits for executor in executors)
        assert found.device.type == "cuda"
        # Cosines and sines are float32 and differ between devices.
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


# --- encoders -------------------------------------------------------------------------------------


ENCODING = ("t5", "bart", "mbart", "marian")


@cache
def pair(kind: str) -> Model:
    return ours(reference_pair(kind, torch.float64))


def encoded(*prompts: list[int], kind: str = "t5") -> list[Tensor]:
    return [pair(kind).encode(Prompt(ids=np.array(prompt))) for prompt in prompts]


def decoded(prompt: list[int], ids: list[int], kind: str = "t5") -> Tensor:
    """(T, V) without a cache."""
    read, written = torch.tensor([prompt]), torch.tensor([ids])
    with torch.inference_mode():
        return pair(kind).forward(read, decoder_input_ids=written)[0]


def run_pair(executor: TorchExecutor, work: Work, encoders: dict[int, Tensor]) -> StepOutput:
    return executor.run(replace(work, encoders=encoders))


@pytest.mark.few(2)
@pytest.mark.parametrize("attentions", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (5, 2), (12, 12), (3, 20)], ids=str)
@pytest.mark.parametrize("kind", ENCODING)
def test_rows_look_at_their_own_encoder(
    kind: str, lengths: tuple[int, int], attentions: bool
) -> None:
    executor, prompts = TorchExecutor(pair(kind)), [IDS[:9], IDS[:4]]
    rows = [(IDS * 2)[:length] for length in lengths]
    verbs = (OPEN, Verb("allocate", 1))
    tokens = ints(*rows[0], *rows[1])
    work = Work(verbs, ints(0, 1), ints(0, 0), ints(*lengths), ints(*lengths), tokens)
    states = dict(enumerate(encoded(*prompts, kind=kind)))
    output = run_pair(executor, asking(work, attentions=attentions), states)
    expected = torch.cat([decoded(p, row, kind) for p, row in zip(prompts, rows, strict=True)])
    assert_near(output.logits, expected)
    more = executor.run(
        Work((), ints(1, 0), ints(*lengths[::-1]), ints(1, 1), ints(1, 1), ints(7, 8))
    )
    after = (prompts[1], [*rows[1], 7]), (prompts[0], [*rows[0], 8])
    assert_near(more.logits, torch.cat([decoded(*one, kind)[-1:] for one in after]))


def test_forks_share_encoder_states() -> None:
    executor = TorchExecutor(pair("t5"))
    run_pair(executor, one_feed(IDS[:3], verbs=(OPEN,)), dict(enumerate(encoded(IDS))))
    work = one_feed([8], row=1, start=3, verbs=(Verb("fork", 1, 0), Verb("free", 0)))
    assert_near(executor.run(work).logits, decoded(IDS, [*IDS[:3], 8])[-1:])
    assert executor.cache.shared == 1


def test_cross_attentions_have_one_entry_per_layer() -> None:
    work = asking(one_feed(IDS[:3], verbs=(OPEN,)), attentions=True)
    output = run_pair(TorchExecutor(pair("t5")), work, dict(enumerate(encoded(IDS))))
    found = answer(output).cross_attentions
    assert [one.shape for one in found] == [(4, 3, 14)] * 3
    assert_near(torch.stack(found).sum(-1), torch.ones(3, 4, 3).double())
