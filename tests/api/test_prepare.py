"""Prompts in every form they may have, and lengths that mean the same whatever the form."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.testing.models import tiny_llama
from tests.models.tiny import ours, reference_t5

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(max_position_embeddings=30)


@pytest.fixture(scope="module")
def translators() -> tuple[Any, LanguageModel]:
    theirs = reference_t5(torch.float64)
    return theirs, LanguageModel(ours(theirs), GenerationConfig())


# --- lengths --------------------------------------------------------------------------------------

FORMS = ("ids", "embeddings", "both")


def in_form(model: LanguageModel, form: str) -> dict[str, Tensor]:
    embeds = model.get_input_embeddings()(IDS)
    given = {"input_ids": IDS, "inputs_embeds": embeds}
    left_out = {"ids": "inputs_embeds", "embeddings": "input_ids"}.get(form)
    return {name: value for name, value in given.items() if name != left_out}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("limits", "new"),
    [
        ({"max_new_tokens": 6}, 6),
        ({"max_length": 10}, 6),
        ({}, 20),
        ({"max_new_tokens": 6, "min_new_tokens": 6}, 6),
        ({"max_length": 10, "min_length": 10}, 6),
    ],
)
def test_a_prompt_counts_once_in_every_form(
    model: LanguageModel, form: str, limits: dict[str, Any], new: int
) -> None:
    eos = list(range(40)) if any("min" in name for name in limits) else None
    given = in_form(model, form)
    cut = nullcontext() if limits else pytest.warns(UserWarning, match="default length")
    with cut:
        out = model.generate(
            **given, **limits, eos_token_id=eos, return_dict_in_generate=True, pad_token_id=3
        )
    assert [len(row) for row in out.new_tokens] == [new, new]
    assert out.sequences.shape[1] == new + (4 if "input_ids" in given else 0)
    assert out.prompt_length == 4
    assert out.effective_config.max_length == 4 + new


def test_the_default_stops_where_the_context_does(model: LanguageModel) -> None:
    with pytest.warns(UserWarning, match=r"default length.*Set max_new_tokens"):
        assert model.generate(IDS.repeat(1, 5), eos_token_id=None).shape[1] == 30


@pytest.mark.parametrize("limit", [{"max_new_tokens": 20}, {"max_length": 24}])
def test_who_sets_a_length_hears_nothing_of_it(model: LanguageModel, limit: dict[str, int]) -> None:
    assert model.generate(IDS, eos_token_id=None, **limit).shape[1] == 24  # warnings are errors


def test_nor_does_who_gets_a_whole_answer(model: LanguageModel) -> None:
    first = model.generate(IDS, max_new_tokens=1)[:, -1].tolist()
    assert model.generate(IDS, eos_token_id=first).shape[1] == 5
    texts = [[5, 6], [7, 8]]
    with pytest.warns(UserWarning, match="default length") as caught:
        es.generate(model, None, texts, eos_token_id=None)
    assert len(caught) == 1
    ends = [one[0] for one in es.generate(model, None, texts, max_new_tokens=1)]
    es.generate(model, None, texts, eos_token_id=ends)


def test_every_end_token_is_held_back_until_the_minimum(model: LanguageModel) -> None:
    plain = model.generate(IDS, max_new_tokens=8, eos_token_id=None)[:, 4:]
    ends = sorted({*plain[:, :3].flatten().tolist()})
    held = model.generate(IDS, max_new_tokens=8, min_new_tokens=4, eos_token_id=ends)[:, 4:]
    assert not set(held[:, :4].flatten().tolist()) & set(ends)


def test_no_time_is_one_token(model: LanguageModel) -> None:
    out = model.generate(IDS, max_time=0.0, max_new_tokens=9, return_dict_in_generate=True)
    assert [reason.kind for reason in out.finish_reasons] == ["time", "time"]
    assert [len(row) for row in out.new_tokens] == [1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_no_cache_is_no_cache_in_every_form(
    model: LanguageModel, form: str, fed: list[int]
) -> None:
    given = {**in_form(model, form), "max_new_tokens": 3, "eos_token_id": None}
    cached = model.generate(**given)
    fed.clear()
    assert torch.equal(model.generate(**given, use_cache=False), cached)
    assert fed == [8, 8 + 10, 8 + 10 + 12]


# --- what holds -----------------------------------------------------------------------------------


def test_effective_values_are_reported_with_their_source(model: LanguageModel) -> None:
    config = GenerationConfig(num_beams=2)
    out = model.generate(
        IDS, config, max_new_tokens=5, eos_token_id=7, pad_token_id=None, temperature=None,
        return_dict_in_generate=True,
    )  # fmt: skip
    told = out.effective_config
    found = {name: (told[name], told.source(name)) for name in told}
    assert found["num_beams"] == (2, "config")
    assert found["max_new_tokens"] == (5, "call")
    assert found["max_length"] == (9, "call")
    assert found["pad_token_id"] == (7, "call")
    assert found["bos_token_id"] == (1, "checkpoint")
    assert found["temperature"] == (1.0, "call")
    assert found["top_p"] == (1.0, "default")


def test_a_loaded_configuration_refuses_nothing_that_it_does_not_need(
    model: LanguageModel,
) -> None:
    loaded = GenerationConfig.from_checkpoint({"cache_implementation": "hybrid", "top_p": 0.9})
    assert model.generate(IDS, loaded, max_new_tokens=2).shape == (2, 6)


def test_a_loaded_configuration_that_asks_for_other_tokens_is_obeyed(model: LanguageModel) -> None:
    loaded = GenerationConfig.from_checkpoint({"dola_layers": "low"})
    asked = model.generate(IDS, dola_layers="low", max_new_tokens=4)
    assert torch.equal(model.generate(IDS, loaded, max_new_tokens=4), asked)


# --- beginnings -----------------------------------------------------------------------------------


def test_nothing_begins_with_the_begin_token(model: LanguageModel) -> None:
    wanted = model.generate(torch.tensor([[1]]), max_new_tokens=4)
    assert torch.equal(model.generate(max_new_tokens=4), wanted)
    mask = torch.ones(2, 1)
    assert torch.equal(model.generate(attention_mask=mask, max_new_tokens=4), wanted.repeat(2, 1))


def test_the_prompt_by_position_is_the_prompt_by_name(model: LanguageModel) -> None:
    by_name = model.generate(input_ids=IDS, max_new_tokens=4)
    assert torch.equal(model.generate(IDS, max_new_tokens=4), by_name)


DECODERS: list[dict[str, Any]] = [
    {"decoder_start_token_id": 0},
    {"decoder_start_token_id": [4, 6]},
    {"bos_token_id": 5},
    {"decoder_start_token_id": 0, "decoder_input_ids": torch.tensor([[0, 7], [0, 9]])},
    {"decoder_start_token_id": 0, "decoder_input_ids": torch.tensor([[8, 7], [6, 9]])},
    {"decoder_start_token_id": 0, "decoder_input_ids": torch.tensor([[0, 7], [6, 9]])},
]


@pytest.mark.parametrize("given", DECODERS)
@pytest.mark.filterwarnings("ignore")
def test_a_decoder_starts_as_in_the_reference(
    translators: tuple[Any, LanguageModel], given: dict[str, Any]
) -> None:
    theirs, translator = translators
    options = {"input_ids": IDS, "max_new_tokens": 6, "pad_token_id": 0, **given}
    wanted = theirs.generate(**options, attention_mask=torch.ones_like(IDS), use_cache=False)
    assert translator.generate(**options).tolist() == wanted.tolist()


def test_a_padded_decoder_prompt_is_each_row_alone(
    translators: tuple[Any, LanguageModel],
) -> None:
    _, translator = translators
    options = {"max_new_tokens": 5, "decoder_start_token_id": 0, "pad_token_id": 0}
    ids, mask = torch.tensor([[6, 7, 8], [0, 0, 9]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
    both = translator.generate(IDS, decoder_input_ids=ids, decoder_attention_mask=mask, **options)
    alone = translator.generate(IDS[1:], decoder_input_ids=torch.tensor([[9]]), **options)
    assert both[1, 2:].tolist() == alone[0].tolist()


def test_encoder_states_of_the_callers_are_used(translators: tuple[Any, LanguageModel]) -> None:
    theirs, translator = translators
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        states = theirs.get_encoder()(IDS, attention_mask=mask).last_hidden_state
    options = {"max_new_tokens": 6, "decoder_start_token_id": 0, "attention_mask": mask}
    wanted = translator.generate(IDS, **options)
    for outputs in (BaseModelOutput(last_hidden_state=states), (states,)):
        found = translator.generate(encoder_outputs=outputs, **options)
        assert torch.equal(found, wanted)
