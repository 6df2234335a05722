"""One value per row, in the configuration or in a caller's processor: each row as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import RequestError
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
