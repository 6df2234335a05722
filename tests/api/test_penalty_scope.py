"""Whether penalties count the ids of the prompt: `penalty_scope`."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.testing.models import tiny_llama
from tests.parity.models import CATALOGUE, pair, subject

NAME = next(iter(CATALOGUE))
IDS = torch.tensor([[5, 6, 7, 8, 5], [3, 3, 9, 10, 11]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


@pytest.mark.parametrize("beams", (1, 3))
@pytest.mark.parametrize("penalty", (1.9, 0.6))
def test_new_is_what_a_processor_that_ignores_the_prompt_gives(penalty: float, beams: int) -> None:
    given: dict[str, Any] = {"attention_mask": MASK, "max_new_tokens": 12, "num_beams": beams}
    given |= {"eos_token_id": None, "pad_token_id": 3, "do_sample": False}
    ignoring = transformers.RepetitionPenaltyLogitsProcessor(penalty, IDS.shape[1])
    wanted = pair(NAME).reference.generate(IDS, **given, logits_processor=[ignoring])
    model = subject(NAME)
    given["repetition_penalty"] = penalty
    assert torch.equal(model.generate(IDS, **given, penalty_scope="new"), wanted)
    both = model.generate(IDS, **given)
    assert torch.equal(model.generate(IDS, **given, penalty_scope="all"), both)
    assert penalty < 1 or not torch.equal(both, wanted)  # a favour repeats either way


class Counting:
    """The definition: what an id loses, by a count over the ids from `start` on."""

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        self.presence, self.frequency, self.start = presence, frequency, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self.start :].tolist(), strict=True):
            for token in {*ids}:
                row[token] -= self.presence + self.frequency * ids.count(token)
        return scores


@pytest.mark.parametrize("scope", (None, "new", "all"))
def test_presence_and_frequency_count_as_the_scope_says(scope: str | None) -> None:
    rng, model = random.Random(str(scope)), tiny_llama()
    for _ in range(4):
        presence, frequency = rng.uniform(-1, 2), rng.uniform(0, 1)
        prompt = torch.tensor([[rng.randrange(4, 46) for _ in range(6)] * 2])
        given: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None}
        start = 0 if scope == "all" else prompt.shape[1]
        defined = Counting(presence, frequency, start)
        wanted = model.generate(prompt, **given, logits_processor=[defined])
        given |= {"presence_penalty": presence, "frequency_penalty": frequency}
        assert torch.equal(model.generate(prompt, **given, penalty_scope=scope), wanted)


@pytest.mark.parametrize("scope", ("new", "all"))
def test_padding_counts_in_no_scope(scope: str) -> None:
    """A row of a batch is as it is alone."""
    model = tiny_llama()
    given: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": None, "penalty_scope": scope}
    given |= {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "pad_token_id": 3}
    together = model.generate(IDS, attention_mask=MASK, **given)
    alone = model.generate(IDS[1:, 2:], **given)
    assert torch.equal(together[1, 2:], alone[0])


def test_every_prompt_of_a_call_may_have_a_scope_of_its_own() -> None:
    model = tiny_llama()
    given: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "repetition_penalty": 2.0}
    prompts = [[5, 6, 7, 8, 5]] * 3
    options = [{"penalty_scope": scope} for scope in (None, "new", "all")]
    found = es.generate(model, None, prompts, options=options, **given)
    alone = [es.generate(model, None, prompts[:1], **given, **own)[0] for own in options]
    assert found == alone and found[0] == found[2] != found[1]


def test_a_prompt_without_ids_is_no_surprise_where_it_does_not_count() -> None:
    model = tiny_llama()
    embeds = model.get_input_embeddings()(IDS[:1])
    given: dict[str, Any] = {"inputs_embeds": embeds, "max_new_tokens": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**given, repetition_penalty=1.5, penalty_scope="new")
        model.generate(**given, presence_penalty=1.5)
    for asked in ({"repetition_penalty": 1.5}, {"presence_penalty": 1.5, "penalty_scope": "all"}):
        with pytest.warns(UserWarning, match="has no ids"):
            model.generate(**given, **asked)


def test_an_unknown_scope_is_refused_and_one_without_a_penalty_is_told() -> None:
    model = tiny_llama()
    with pytest.raises(es.EverystepError, match=r"penalty_scope.*'all', 'new'"):
        model.generate(IDS, penalty_scope="prompt", max_new_tokens=2)
    with pytest.warns(UserWarning, match="penalty_scope has no effect without a penalty"):
        model.generate(IDS, penalty_scope="new", max_new_tokens=2)
