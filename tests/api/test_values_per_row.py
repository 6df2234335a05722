"""One value per row, in the configuration or in a caller's processor: each row as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError, RequestError
from everystep.testing.models import tiny_llama

IDS = torch.tensor([[5, 6, 7], [11, 12, 5], [20, 21, 20]])
VALUES: dict[str, list[Any]] = {
    "temperature": [0.3, 1.0, 2.5],
    "top_k": [1, 0, 7],
    "top_p": [0.1, 1.0, 0.8],
    "min_p": [0.0, 0.2, 0.9],
    "top_h": [0.1, 0.5, 1.0],
    "typical_p": [0.2, 0.6, 1.0],
    "epsilon_cutoff": [0.0, 0.01, 0.1],
    "eta_cutoff": [0.1, 0.0, 0.01],
    "repetition_penalty": [1.0, 1.5, 0.5],
    "encoder_repetition_penalty": [1.0, 3.0, 0.5],
    "no_repeat_ngram_size": [0, 1, 2],
    "encoder_no_repeat_ngram_size": [0, 1, 2],
    "presence_penalty": [0.0, 2.0, -1.0],
    "frequency_penalty": [2.0, 0.0, 0.5],
    "dry_multiplier": [0.0, 9.0, 2.0],
}
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "max_new_tokens": 6,
    "min_new_tokens": 6,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def each_alone(model: LanguageModel, named: list[dict[str, Any]]) -> list[list[int]]:
    return [
        model.generate(IDS[row : row + 1], seed=row, **SAMPLED, **one)[0].tolist()
        for row, one in enumerate(named)
    ]


@pytest.mark.parametrize("name", sorted(VALUES))
def test_a_field_may_have_a_value_per_row(model: LanguageModel, name: str) -> None:
    alone = each_alone(model, [{name: value} for value in VALUES[name]])
    together = model.generate(IDS, seed=[0, 1, 2], **SAMPLED, **{name: VALUES[name]})
    assert together.tolist() == alone


@pytest.mark.parametrize("name", ["dry_base", "dry_allowed_length"])
def test_rows_have_a_dry_of_their_own(model: LanguageModel, name: str) -> None:
    values: list[Any] = {"dry_base": [1.0, 3.0, 1.75], "dry_allowed_length": [1, 9, 2]}[name]
    prompt = IDS.repeat(1, 3)
    given: dict[str, Any] = {"dry_multiplier": [4.0, 2.0, 3.0], "max_new_tokens": 8}
    together = model.generate(prompt, eos_token_id=None, **{**given, name: values})
    for row, (value, strength) in enumerate(zip(values, given["dry_multiplier"], strict=True)):
        own = {"dry_multiplier": strength, name: value, "max_new_tokens": 8}
        alone = model.generate(prompt[row : row + 1], eos_token_id=None, **own)
        assert together[row].tolist() == alone[0].tolist()


LENGTHS: list[dict[str, Any]] = [
    {"max_new_tokens": [2, 7, 4]},
    {"max_new_tokens": [2, 7, 4], "num_beams": 3, "early_stopping": "never"},
    {"max_new_tokens": [3, 3, 9], "forced_eos_token_id": 9, "eos_token_id": 9},
    {"max_new_tokens": [5, 1, 3], "do_sample": True, "num_return_sequences": 2},
    {"max_new_tokens": [2, 6, 4], "min_new_tokens": [2, 5, 0], "eos_token_id": [*range(3, 48)]},
    {"max_new_tokens": 6, "min_new_tokens": [1, 0, 4], "eos_token_id": [*range(3, 48)]},
    {"max_new_tokens": [1, 6, 3], "prompt_lookup_num_tokens": 3},
]


@pytest.mark.parametrize("settings", LENGTHS, ids=str)
def test_a_row_may_have_a_length_of_its_own(model: LanguageModel, settings: dict[str, Any]) -> None:
    given: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": None, **settings}
    given |= {"return_dict_in_generate": True}
    found = model.generate(IDS, seed=[0, 1, 2], **given)
    each = settings.get("num_return_sequences", 1)
    lists = {n: one for n, one in settings.items() if isinstance(one, list) and "tokens" in n}
    for row in range(3):
        own = {**given, **{name: values[row] for name, values in lists.items()}}
        alone = model.generate(IDS[row : row + 1], seed=row, **own)
        assert found.new_tokens[row * each : (row + 1) * each] == alone.new_tokens
        kinds = [one.kind for one in found.finish_reasons[row * each : (row + 1) * each]]
        assert kinds == [one.kind for one in alone.finish_reasons]
    assert found.sequences.shape[1] - 3 == max(map(len, found.new_tokens))


def test_a_length_that_no_row_or_call_can_have_is_refused(model: LanguageModel) -> None:
    for given, said in (
        ({"max_new_tokens": [1, 2]}, "max_new_tokens does not fit the rows"),
        ({"max_new_tokens": [4, 0, 2]}, "max_new_tokens is not valid"),
        ({"max_new_tokens": [4, 2, 3], "min_new_tokens": [1, 1, 4]}, "cannot be reached"),
        ({"max_new_tokens": [4, 2, 3], "min_new_tokens": 3}, "cannot be reached"),
        (
            {"max_new_tokens": [4, 2, 3], "custom_generate": lambda model, ids, **_: ids},
            "does not go with a length for each row",
        ),
    ):
        with pytest.raises(EverystepError, match=said):
            model.generate(IDS, **given)  # type: ignore[arg-type]


def test_a_criterion_of_the_callers_takes_the_place_of_all_limits(model: LanguageModel) -> None:
    given: dict[str, Any] = {"max_new_tokens": [1, 2, 3], "return_dict_in_generate": True}
    given |= {"stopping_criteria": [es.MaxLengthCriteria(7)], "eos_token_id": None}
    with pytest.warns(UserWarning, match="takes the place"):
        found = model.generate(IDS, **given)
    assert [len(one) for one in found.new_tokens] == [4, 4, 4]


@pytest.mark.filterwarnings("ignore:The MaxLengthCriteria")
def test_prompts_of_a_call_have_lengths_ends_beams_and_dry_of_their_own(
    model: LanguageModel,
) -> None:
    options: list[dict[str, Any]] = [
        {"max_new_tokens": 3},
        {"eos_token_id": [*range(3, 40)], "min_new_tokens": 2},
        {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
        {"dry_multiplier": 5.0, "dry_base": 2.0, "dry_allowed_length": 1},
        {"stopping_criteria": [es.MaxLengthCriteria(5)]},
    ]
    prompt = [5, 6, 5, 6]
    common: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    common |= {"return_dict_in_generate": True}
    found = es.generate(model, None, [prompt] * len(options), options=options, **common)
    for one, own in zip(found, options, strict=True):
        alone = es.generate(model, None, prompt, **{**common, **own})
        pairs = zip(*((x if isinstance(x, list) else [x]) for x in (one, alone)), strict=True)
        assert all(mine.tokens == other.tokens for mine, other in pairs)


@pytest.mark.parametrize("form", [torch.tensor, np.array])
def test_values_may_be_given_as_a_tensor_or_in_a_configuration(
    model: LanguageModel, form: Any
) -> None:
    values = [0.25, 1.0, 2.5]
    expected = model.generate(IDS, seed=7, temperature=values, **SAMPLED)
    assert torch.equal(model.generate(IDS, seed=7, temperature=form(values), **SAMPLED), expected)
    config = es.GenerationConfig(temperature=form(values), do_sample=True)
    assert torch.equal(model.generate(IDS, config, seed=7, **SAMPLED), expected)


def test_a_callers_processor_may_have_a_value_per_row(model: LanguageModel) -> None:
    own = es.RepetitionPenaltyLogitsProcessor([0.5, 1.0, 3.0])
    together = model.generate(IDS, seed=[0, 1, 2], logits_processor=[own], **SAMPLED)
    each = [[es.RepetitionPenaltyLogitsProcessor(p)] for p in (0.5, 1.0, 3.0)]
    assert together.tolist() == each_alone(model, [{"logits_processor": one} for one in each])


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.6], [0.5] * 4])
def test_other_numbers_of_values_are_refused(model: LanguageModel, values: list[float]) -> None:
    wanted = r"temperature does not fit the rows .* wanted one value, or 3 of them"
    with pytest.raises(RequestError, match=wanted):
        model.generate(IDS, temperature=values, **SAMPLED)
    with pytest.raises(RequestError, match="does not fit the rows; wanted one number, or 3"):
        own = es.TemperatureLogitsWarper(values)
        model.generate(IDS, logits_processor=[own], **SAMPLED)


def test_each_value_of_a_field_is_checked(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"top_p is not valid; .* got 1.5"):
        model.generate(IDS, top_p=[0.5, 1.5, 0.5], **SAMPLED)
    with pytest.raises(RequestError, match="min_length is not valid"):
        model.generate(IDS, min_length=[1, 2, 3], **SAMPLED)
    with pytest.raises(RequestError, match="same number of candidates"):
        model.generate(IDS, penalty_alpha=0.6, top_k=[4, 5, 6], max_new_tokens=3)
    with pytest.raises(RequestError, match=r"temperature .* do_sample=False"):
        model.generate(IDS, temperature=[0.0, 1.0, 1.0], **SAMPLED)


def test_values_per_row_survive_a_file() -> None:
    config = es.GenerationConfig(temperature=[0.5, 2.0], do_sample=True)
    assert es.GenerationConfig.from_dict(config.to_dict()) == config


def test_values_per_row_with_several_sequences(model: LanguageModel) -> None:
    own = {"temperature": [0.2, 1.0, 3.0], "num_return_sequences": 2}
    together = model.generate(IDS, seed=[0, 1, 2], **SAMPLED, **own)
    for row, value in enumerate((0.2, 1.0, 3.0)):
        named = {**SAMPLED, **own, "temperature": value}
        alone = model.generate(IDS[row : row + 1], seed=row, **named)
        assert together[2 * row : 2 * row + 2].tolist() == alone.tolist()
