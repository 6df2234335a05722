"""Every wrong call is refused before any compute, by an error that names what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.errors import EverystepError, ModelClassError, OversizeError, RequestError
from everystep.errors import UnsupportedError as Absent
from everystep.models import Model
from everystep.testing.models import tiny_llama
from tests.api.wrong_calls import IDS, SOURCE, TOKENIZER, WRONG
from tests.models.tiny import ours, reference_t5


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(hidden_size=16)


@pytest.fixture(scope="module")
def translator() -> LanguageModel:
    core = ours(reference_t5(torch.float64))
    return LanguageModel(core, GenerationConfig(decoder_start_token_id=0, eos_token_id=1))


def refused(
    model: LanguageModel,
    arguments: dict[str, Any],
    error: type[EverystepError],
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """The text of the error, which came before the model was asked for anything."""

    def computes(*_: object) -> None:
        raise AssertionError("the call reached the model")

    monkeypatch.setattr(LanguageModel, "executor", computes)
    monkeypatch.setattr(Model, "encode", computes)
    with pytest.raises(error) as caught:
        model.generate(**{"input_ids": IDS, **arguments})
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(*rest, id=name) for name, *rest in WRONG]
)
def test_a_wrong_call_is_refused_with_what_to_do(
    model: LanguageModel,
    arguments: dict[str, Any],
    error: type[EverystepError],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = refused(model, arguments, error, monkeypatch)
    assert [part for part in parts if part not in text] == []
    assert text.endswith(".") and ". " in text  # what is wrong, then what to do


@pytest.mark.parametrize(
    ("arguments", "error", "parts"), [pytest.param(*rest, id=name) for name, *rest in SOURCE]
)
def test_a_wrong_call_of_a_model_with_an_encoder_is_refused(
    translator: LanguageModel,
    arguments: dict[str, Any],
    error: type[EverystepError],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = refused(translator, arguments, error, monkeypatch)
    assert [part for part in parts if part not in text] == []


def test_the_table_holds_a_hundred_causes() -> None:
    names = [name for name, *_ in WRONG]
    assert len(set(names)) == len(names) >= 100


def test_a_refused_call_leaves_the_model_usable(model: LanguageModel) -> None:
    before = model.generate(IDS, max_new_tokens=4)
    with pytest.raises(RequestError):
        model.generate(IDS, max_new_tokens=0)
    assert torch.equal(model.generate(IDS, max_new_tokens=4), before)


@pytest.mark.parametrize("ask", [es.generate, es.stream])
def test_a_prompt_longer_than_the_context_is_refused(ask: Any) -> None:
    short = tiny_llama(max_position_embeddings=8, vocab_size=320)
    with pytest.raises(OversizeError, match=r"fewer than 8 tokens; got 8. Shorten the prompt"):
        ask(short, TOKENIZER, [5] * 8, max_new_tokens=3)
    assert es.generate(short, TOKENIZER, [5] * 7, max_new_tokens=1) is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("load", [es.load, es.load_model])
def test_a_device_that_is_not_there_is_refused_by_name(load: Any) -> None:
    with pytest.raises(Absent, match=r"'cuda' is not on this machine.*Pass device='cpu'"):
        load("smollm2-135m-instruct", device="cuda")
    with pytest.raises(Absent, match="is not on this machine"):
        tiny_llama().to("cuda:1")


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(RequestError, match=r"device is no device; wanted 'cpu'.*got 'gpu'"):
        es.load("smollm2-135m-instruct", device="gpu")


def test_what_is_no_model_cannot_generate() -> None:
    core: Any = torch.nn.Linear(2, 2)
    with pytest.raises(ModelClassError, match=r"not a model that can generate.*got Linear"):
        LanguageModel(core)
