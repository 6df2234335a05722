"""What layers show is kept token by token, whoever stands beside and whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.models import tiny_llama

PROMPTS: list[list[int]] = [[5, 6, 7, 5, 6, 7, 5], [11, 12, 11, 12], [20]]
SHOWN: dict[str, Any] = {
    "output_hidden_states": True,
    "return_dict_in_generate": True,
    "eos_token_id": None,
    "max_new_tokens": 7,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drafted": {"prompt_lookup_num_tokens": 3, "num_assistant_tokens_schedule": "constant"},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(hidden_size=16)


def last_states(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """(T, E) of the last layer, of all positions at once."""
    out = model(torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[-1][0]


@pytest.mark.parametrize("way", WAYS)
def test_each_token_shows_the_states_it_was_chosen_from(way: str, model: LanguageModel) -> None:
    results = es.generate(model, None, PROMPTS, **SHOWN, **WAYS[way])
    for prompt, one in zip(PROMPTS, results, strict=True):
        tokens = [*map(int, one.tokens)]
        assert one.hidden_states is not None and len(one.hidden_states) == len(tokens) == 7
        wanted = last_states(model, [*prompt, *tokens[:-1]])
        found = torch.cat([layers[-1] for layers in one.hidden_states])
        assert torch.allclose(found, wanted, atol=1e-5)
        counts = [layers[-1].shape[0] for layers in one.hidden_states]
        assert counts == [len(prompt), *[1] * 6]


def test_a_row_that_needed_fewer_steps_has_no_scores_in_the_others(model: LanguageModel) -> None:
    ids = torch.tensor([[5, 6, 7], [11, 12, 13]])
    options = {**SHOWN, **WAYS["contrastive"], "output_scores": True}
    first = model.generate(ids, **options).new_tokens[0][2]
    out = model.generate(ids, **{**options, "eos_token_id": first})
    lengths = [len(tokens) for tokens in out.new_tokens]
    assert lengths[0] == 3 < lengths[1] == len(out.scores)
    for step, scores in enumerate(out.scores):
        assert bool(scores[0].isneginf().all()) == (step >= 3)
        assert bool(scores[1].isfinite().any())
