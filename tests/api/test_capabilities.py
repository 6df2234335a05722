"""What a model says it can do is what its calls do, and the reason is that of their error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest
import torch

import everystep as es
from everystep.api.capabilities import FEATURES, CallName
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.engine import Engine
from everystep.errors import EverystepError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import ours, reference_decoder, reference_mamba, reference_pair

PROMPT = [5, 6, 7]
NEW: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": 2, "pad_token_id": 0}
MODELS: dict[str, Callable[[], LanguageModel]] = {
    "decoder": lambda: tiny_llama(dtype=torch.float32),
    "recurrent": lambda: LanguageModel(ours(reference_mamba(torch.float32))),
    "encoder": lambda: LanguageModel(
        ours(reference_pair("bart", torch.float32)), GenerationConfig(decoder_start_token_id=3)
    ),
    "wrapped": lambda: es.wrap(reference_decoder("llama", torch.float32)),
}


@cache
def model_of(name: str) -> LanguageModel:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return MODELS[name]()


class Quiet(es.Hook):
    """A hook that sees every step and adds nothing."""


async def submitted(model: LanguageModel, given: dict[str, Any]) -> Any:
    async with es.AsyncEngine(model) as engine:
        return [event async for event in engine.stream(PROMPT, **given)]


def called(model: LanguageModel, call: str, given: dict[str, Any]) -> None:
    """The call itself, to its end."""
    if call == "model.generate":
        model.generate(torch.tensor([PROMPT]), **given)
    elif call == "es.generate":
        es.generate(model, None, PROMPT, **given)
    elif call == "es.stream":
        list(es.stream(model, None, PROMPT, **given))
    elif call == "es.open":
        es.open(model, None, PROMPT, **given).result()
    else:
        asyncio.run(submitted(model, given))


CELLS = [
    (name, call, feature) for name in MODELS for call in get_args(CallName) for feature in FEATURES
]
FURTHER: dict[str, dict[str, Any]] = {
    "a streamer": {"streamer": 7},
    "a misspelt name": {"num_beans": 3},
    "an impossible value": {"temperature": -1.0, "do_sample": True},
    "a loop with hooks": {"custom_generate": lambda model, ids, **_: ids, "hooks": [Quiet()]},
    "too many best": {"logprobs": 10**6, "return_dict_in_generate": True},
    "an adapter": {"adapter_names": "formal"},
    "a schema without a tokenizer": {"regex": "a+"},
}


def check(name: str, call: Any, given: dict[str, Any]) -> None:
    model, given = model_of(name), {**NEW, **given}
    found = model.can(call, prompt=PROMPT, **given)
    try:
        called(model, call, given)
    except EverystepError as error:
        assert not found and found.reason == str(found) == str(error)
    else:
        assert found and str(found) == "yes" and found.call == call


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "call", "feature"), random.Random(5).sample(CELLS, 60))
def test_an_answer_is_that_of_the_call(name: str, call: str, feature: str) -> None:
    check(name, call, dict(FEATURES[feature]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "call", "feature"), CELLS)
def test_each_answer_is_that_of_the_call(name: str, call: str, feature: str) -> None:
    check(name, call, dict(FEATURES[feature]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_an_engine_that_is_open_has_caches_of_one_kind(name: str) -> None:
    check(name, "AsyncEngine", {"cache_implementation": "quantized"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", get_args(CallName))
@pytest.mark.parametrize("asked", FURTHER)
def test_what_is_wrong_with_a_call_is_the_reason(call: str, asked: str) -> None:
    check("decoder", call, FURTHER[asked])


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_every_call_and_computes_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def computed(*_: Any, **__: Any) -> None:
        raise AssertionError("something was computed")

    model = model_of(name)
    monkeypatch.setattr(Engine, "step", computed)
    monkeypatch.setattr(LanguageModel, "__call__", computed)
    table = model.capabilities()
    assert {*table} == {*FEATURES}
    assert all({*row} == {*get_args(CallName)} for row in table.values())
    assert all(table["greedy decoding"].values())
    assert not table["no cache"]["es.stream"] and table["no cache"]["model.generate"]
    if name == "recurrent":
        assert not table["static cache"]["model.generate"]
        assert not table["drafts by early layers"]["es.generate"]


def test_a_conversation_is_asked_for_as_one() -> None:
    model, messages = tiny_llama(vocab_size=320), [{"role": "user", "content": "a"}]
    given: dict[str, Any] = {"prompt": messages, "tokenizer": tiny_tokenizer(320)}
    assert all(model.can(call, **given) for call in get_args(CallName))
    assert "tokenizer" in model.can("es.generate", prompt=messages).reason


def test_a_call_that_nobody_knows_is_refused() -> None:
    wrong: Any = "es.foresee"
    with pytest.raises(EverystepError, match=r"call is not valid.*'es.generate'"):
        tiny_llama().can(wrong)
