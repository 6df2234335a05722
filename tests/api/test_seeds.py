"""One seed for all prompts, or one for each: no two prompts of a call share their draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.draws import seed_of
from everystep.errors import RequestError
from everystep.testing.models import tiny_llama

PROMPTS: list[list[int]] = [[5, 6, 7], [8, 9], [5, 6, 7]]
DRAWN: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def alone(model: LanguageModel, prompt: list[int], seed: int, **options: Any) -> list[list[int]]:
    ids = model.generate(torch.tensor([prompt]), seed=seed, **DRAWN, **options)
    return [row[len(prompt) :] for row in ids.tolist()]


def test_every_prompt_has_its_own(model: LanguageModel) -> None:
    many = es.generate(model, None, PROMPTS, seed=[3, 4, 5], **DRAWN)
    expected = [
        alone(model, prompt, seed)[0] for prompt, seed in zip(PROMPTS, (3, 4, 5), strict=True)
    ]
    assert many == expected
    assert many[0] != many[2]


def test_from_one_each_prompt_gets_its_own(model: LanguageModel) -> None:
    many = es.generate(model, None, PROMPTS, seed=3, **DRAWN)
    own = [seed_of(3, index) for index in range(3)]
    assert many == [
        alone(model, prompt, seed)[0] for prompt, seed in zip(PROMPTS, own, strict=True)
    ]
    assert many[0] != many[2]
    assert many == es.generate(model, None, PROMPTS, seed=own, **DRAWN)


def test_from_one_each_row_gets_its_own(model: LanguageModel) -> None:
    rows = torch.tensor([PROMPTS[0]] * 3)
    from_one = model.generate(rows, seed=3, **DRAWN)
    own = [seed_of(3, row) for row in range(3)]
    assert torch.equal(from_one, model.generate(rows, seed=own, **DRAWN))
    assert len({tuple(row) for row in from_one.tolist()}) == 3


def test_without_one_prompts_do_not_share_their_draws(model: LanguageModel) -> None:
    torch.manual_seed(0)
    many = es.generate(model, None, [PROMPTS[0]] * 4, **DRAWN)
    assert len({tuple(one) for one in many}) == 4


def test_the_first_prompt_has_the_seed_itself_and_no_two_the_same() -> None:
    assert seed_of(7, 0) == 7
    seeds = {seed_of(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50


def test_all_answers_to_a_prompt_follow_from_one(model: LanguageModel) -> None:
    several: dict[str, Any] = {"num_return_sequences": 2}
    many = es.generate(model, None, PROMPTS, seed=(3, 4, 5), **DRAWN, **several)
    assert many[1] == alone(model, PROMPTS[1], 4, **several)


def test_a_list_of_one_seeds_one_prompt(model: LanguageModel) -> None:
    assert es.generate(model, None, PROMPTS[0], seed=[3], **DRAWN) == alone(model, PROMPTS[0], 3)[0]


def test_streams_have_them_too(model: LanguageModel) -> None:
    stream = es.stream(model, None, PROMPTS, seed=[3, 4, 5], **DRAWN)
    told: dict[str, list[int]] = {"0": [], "1": [], "2": []}
    for event in stream:
        told[event.request_id].append(event.token)
    assert list(told.values()) == es.generate(model, None, PROMPTS, seed=[3, 4, 5], **DRAWN)


@pytest.mark.parametrize("seed", [[3, 4], [3, 4, 5, 6], [], "abc", [1, 2, True], 1.5, [1, 2, None]])
def test_what_does_not_fit_the_prompts_is_refused(model: LanguageModel, seed: Any) -> None:
    for call in (es.generate, es.stream):
        with pytest.raises(RequestError, match=r"seed does not fit.*3 of them"):
            call(model, None, PROMPTS, seed=seed, **DRAWN)


def test_prompts_that_come_one_by_one_cannot_have_one_each(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match=r"one by one.*list"):
        es.generate(model, None, iter(PROMPTS), seed=[3, 4, 5], **DRAWN)
    assert len(es.generate(model, None, iter(PROMPTS), seed=3, **DRAWN)) == 3


@pytest.mark.parametrize("known", [1, 5, 11])
@pytest.mark.parametrize("rows", [1, 3])
def test_what_goes_on_from_a_cache_draws_on(model: LanguageModel, rows: int, known: int) -> None:
    """Draws follow from where in its row a token stands, not from when a call began."""
    prompt = torch.tensor([PROMPTS[0]] * rows)
    sampled: dict[str, Any] = {"do_sample": True, "eos_token_id": None, "seed": 3}
    whole = model.generate(prompt, max_new_tokens=12, **sampled)
    first: Any = model.generate(
        prompt, max_new_tokens=known, return_dict_in_generate=True, **sampled
    )
    assert torch.equal(first.sequences, whole[:, : 3 + known])
    cache, rest = first.past_key_values, {"max_new_tokens": 12 - known, **sampled}
    assert torch.equal(model.generate(first.sequences, past_key_values=cache, **rest), whole)
    # Without the cache as well; and another seed goes on otherwise.
    assert torch.equal(model.generate(first.sequences, **rest), whole)
    if known < 11:
        assert not torch.equal(model.generate(first.sequences, **{**rest, "seed": 4}), whole)


def test_equal_prompts_of_a_call_share_no_number(model: LanguageModel) -> None:
    """The first tokens already differ: 16 equal draws of a flat distribution are no accident."""
    many = es.generate(model, None, [PROMPTS[0]] * 16, seed=3, temperature=100.0, **DRAWN)
    for step in range(12):
        assert len({one[step] for one in many}) > 4, step
    rows = model.generate(torch.tensor([PROMPTS[0]] * 16), seed=3, temperature=100.0, **DRAWN)
    assert rows[:, 3:].tolist() == many
