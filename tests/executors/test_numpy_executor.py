"""The numpy executor against the forward without a cache, and the engine on top of it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.engine import Continuous, Engine, Lockstep
from everystep.errors import InvariantError, RequestError, UnsupportedError
from everystep.models import Model
from everystep.models.spec import NormSpec
from everystep.types import Prompt, Request, StepOutput, Verb, Wants, Work
from tests.executors.models import (
    EXPERTS,
    PLAIN,
    SPECS,
    family_model,
    random_model,
    with_mlp,
    with_norm,
)
from tests.executors.prefixes import Prefixes
from tests.executors.requests import REQUESTS
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
from tests.judges import textbook
from tests.judges.drive import Drive, run_together
from tests.judges.numpy_executor import NumpyExecutor

IDS = np.random.default_rng(7).integers(0, 40, 24).tolist()
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
OPEN = Verb("allocate", 0)


@cache
def model_of(name: str) -> Model:
    return random_model(SPECS[name])


def fed(name: str, tokens: list[int] = IDS, **wants: Any) -> StepOutput:
    """What a fresh executor makes of one feed into one row."""
    work = asking(one_feed(tokens, verbs=(OPEN,)), **wants)
    return NumpyExecutor(model_of(name)).run(work)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


# --- what a decoder computes ----------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_logits_are_those_of_the_plain_forward(name: str) -> None:
    assert_near(fed(name).logits, read(model_of(name), IDS).logits(model_of(name)))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("qwen2", {}),
        ("qwen2", QWEN2_WINDOW),
    ],
)
def test_families_are_read_as_their_plain_forward(family: str, config: dict[str, Any]) -> None:
    model = family_model(family, **config)
    output = NumpyExecutor(model).run(one_feed(IDS, verbs=(OPEN,)))
    assert_near(output.logits, read(model, IDS).logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_models_differ_by_their_own_rounding(dtype: torch.dtype) -> None:
    model = random_model(SPECS["tied"], dtype=dtype)
    output = NumpyExecutor(model).run(one_feed(IDS, verbs=(OPEN,)))
    wanted = read(model, IDS).logits(model).double()
    error = (output.logits - wanted).norm() / wanted.norm()
    assert 0 < error < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["plain", "window", "plus one"])
def test_layers_are_the_states_between_them(name: str) -> None:
    wanted = read(model_of(name), IDS).watched(model_of(name)).layers
    assert_near(torch.stack(answer(fed(name, layers=True)).layers), torch.stack(wanted))


@pytest.mark.parametrize("name", ["plain", "window", "capped scores"])
def test_attentions_are_the_weights_of_every_head(name: str) -> None:
    wanted = read(model_of(name), IDS).watched(model_of(name)).attentions
    found = answer(fed(name, attentions=True)).attentions
    assert_near(torch.stack(found), torch.stack(wanted))


def test_a_specification_says_nothing_that_is_not_read() -> None:
    said = {
        f"{type(part).__name__}.{field.name}"
        for part in (PLAIN, PLAIN.norm, PLAIN.attention, PLAIN.mlp, PLAIN.layers[0], EXPERTS)
        for field in fields(part)
    }
    assert said == {
        *(f"NormSpec.{name}" for name in ("kind", "eps", "plus_one", "bias")),
        *(f"AttentionSpec.{name}" for name in ("heads", "kv_heads", "head_dim", "scale")),
        *(f"AttentionSpec.{name}" for name in ("qkv_bias", "out_bias", "qk_norm", "softcap")),
        *(f"MlpSpec.{name}" for name in ("size", "activation", "gated", "bias")),
        *(f"LayerSpec.{name}" for name in ("rope", "window", "factor", "experts")),
        *(f"ExpertsSpec.{name}" for name in ("count", "chosen", "size", "normalised")),
        *(f"DecoderSpec.{name}" for name in ("vocab_size", "width", "norm", "attention", "mlp")),
        *(f"DecoderSpec.{name}" for name in ("layers", "parallel", "post_norms", "embed_scale")),
        *(f"DecoderSpec.{name}" for name in ("tied", "head_bias", "final_softcap", "pre_norms")),
        "DecoderSpec.positions",
        "DecoderSpec.deepstack",  # which it refuses
        "DecoderSpec.vision",  # which no executor reads
    }


@pytest.mark.parametrize(
    "spec",
    [
        object(),
        replace(PLAIN, deepstack=1),
        with_mlp(activation="sine"),
        with_norm(NormSpec("rms", 1e-5, bias=True)),
        with_norm(NormSpec("layer", 1e-5, plus_one=True)),
        with_norm(NormSpec("batch", 1e-5)),  # type: ignore[arg-type]
    ],
)
def test_what_it_cannot_compute_is_refused_at_once(spec: Any) -> None:
    with pytest.raises(UnsupportedError):
        NumpyExecutor(replace(model_of("plain"), spec=spec))


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "window", "head", "rope yarn", "layer norm"])
@given(seed=st.integers(0, 2**32 - 1), positions=st.booleans())
@settings(max_examples=12)
def test_rows_hold_what_they_have_read(name: str, seed: int, positions: bool) -> None:
    wander(Wanderer(model_of(name), np.random.default_rng(seed), positions))


@pytest.mark.parametrize("name", ["rope dynamic", "rope longrope"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8)
def test_ropes_by_length_hold_within_the_trained_length(name: str, seed: int) -> None:
    wander(Wanderer(model_of(name), np.random.default_rng(seed), False, longest=16))


def wander(wanderer: Wanderer) -> None:
    """Ten works, each with the right logits and the right rows after it."""
    executor = NumpyExecutor(wanderer.model)
    for _ in range(10):
        work = wanderer.work()
        output = executor.run(work)
        assert_near(output.logits, expected_logits(wanderer.model, work, wanderer.histories))
        held = {row: len(history.positions) for row, history in wanderer.histories.items()}
        assert executor.audit() == held


def test_hidden_states_are_those_of_the_fed_positions() -> None:
    executor = NumpyExecutor(model_of("plain"))
    executor.run(one_feed(IDS[:6], verbs=(OPEN,)))
    verbs = (Verb("truncate", 0, 4), Verb("fork", 1, 0))
    work = asking(one_feed(IDS[4:9], row=1, start=4, verbs=verbs), hidden=True)
    states = read(model_of("plain"), IDS[:9]).watched(model_of("plain")).layers[-1]
    assert_near(answer(executor.run(work)).hidden, states[4:])


def test_a_plain_feed_has_no_answer() -> None:
    assert fed("plain").answers[0].hidden is None
    assert NumpyExecutor(model_of("plain")).run(one_feed(IDS, verbs=(OPEN,))).answers == {}


def test_a_cached_row_gives_layers_of_the_fed_positions_only() -> None:
    executor = NumpyExecutor(model_of("plain"))
    executor.run(one_feed(IDS[:6], verbs=(OPEN,)))
    work = one_feed(IDS[6:9], start=6)
    found = answer(executor.run(asking(work, layers=True, attentions=True)))
    watched = read(model_of("plain"), IDS[:9]).watched(model_of("plain"))
    assert_near(torch.stack(found.layers), torch.stack(watched.layers)[:, 6:])
    assert_near(torch.stack(found.attentions), torch.stack(watched.attentions)[:, :, 6:])


def test_a_work_of_verbs_alone_gives_no_logits() -> None:
    executor = NumpyExecutor(model_of("plain"))
    assert executor.run(only_verbs(OPEN)).logits.shape == (0, 40)
    assert executor.audit() == {0: 0}


def test_a_freed_row_may_be_allocated_again() -> None:
    executor = NumpyExecutor(model_of("plain"))
    executor.run(one_feed(IDS, verbs=(OPEN,)))
    again = executor.run(one_feed(IDS[:3], verbs=(Verb("free", 0), OPEN)))
    assert_near(again.logits, fed("plain", IDS[:3]).logits)


@pytest.mark.parametrize(
    "work",
    [
        one_feed([1], start=2),
        one_feed([1], start=4),
        one_feed([1], row=1),
        one_feed([]),
        one_feed([40], start=3),
        one_feed([-1], start=3),
        replace(one_feed([1], start=3), logits=ints(2)),
        replace(one_feed([1], start=3), counts=ints(2)),
        replace(one_feed([1], start=3), extras={0: embedded(0, torch.zeros(1, 32))}),
        replace(one_feed([-1], start=3), extras={0: embedded(0, torch.zeros(2, 32))}),
        Work((), ints(0, 0), ints(3, 3), ints(1, 1), ints(1, 1), ints(1, 1)),
        Work((), ints(0), ints(3, 3), ints(1), ints(1), ints(1)),
        only_verbs(OPEN),
        only_verbs(Verb("fork", 0, 0)),
        only_verbs(Verb("fork", 2, 1)),
        only_verbs(Verb("truncate", 0, 4)),
        only_verbs(Verb("truncate", 0, -1)),
        only_verbs(Verb("truncate", 1, 0)),
        only_verbs(Verb("free", 1)),
        replace(only_verbs(Verb("allocate", 1)), encoders={1: torch.zeros(2, 32)}),
    ],
)
def test_misuse_is_found(work: Work) -> None:
    executor = NumpyExecutor(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    with pytest.raises(InvariantError):
        executor.run(work)


def test_several_positions_per_input_are_refused() -> None:
    with pytest.raises(RequestError, match="one position per token"):
        fed("plain", positions=torch.zeros(3, len(IDS), dtype=torch.int64))


# --- the engine on top of it ----------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_engine_chooses_as_the_textbook_does_without_a_cache(chunk: int | None) -> None:
    run = run_together(REQUESTS, NumpyExecutor(model_of("plain")), chunk)
    assert_results(run, REQUESTS, model_of("plain"))


def test_requests_that_come_and_go_are_answered_as_alone() -> None:
    scheduler = Continuous(token_budget=9, max_rows=6)
    run = Drive(Engine(NumpyExecutor(model_of("window")), scheduler))
    for request in REQUESTS:
        run.submit(request)
    assert_results(run.finish(), REQUESTS, model_of("window"))


def assert_results(run: Drive, requests: tuple[Request, ...], model: Model) -> None:
    for request in requests:
        found = run.results[request.request_id]
        wanted = textbook.generate(request, Prefixes(model))
        assert [(h.tokens, h.reason) for h in found] == [(h.tokens, h.reason) for h in wanted]
        if request.strategy.reads.scores == "log_probs":  # which the engine adds up in float32
            scores = [h.score for h in wanted]
            assert [h.score for h in found] == pytest.approx(scores, abs=1e-6)


def test_encoder_states_are_refused_by_the_engine() -> None:
    prompt = Prompt(ids=ints(1), encoder=torch.zeros(2, 32))
    engine = Engine(NumpyExecutor(model_of("plain")), Lockstep())
    with pytest.raises(UnsupportedError, match="NumpyExecutor"):
        engine.submit(replace(REQUESTS[0], prompt=prompt, wants=Wants()))
