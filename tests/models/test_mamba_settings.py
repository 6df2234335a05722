"""Mamba gives transformers' tokens and scores under random settings of `generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.models.test_stores import MASK, PROMPTS, QUIET, pair
from tests.models.tiny import farthest

# What changes scores or ends: each is drawn in a third of all settings.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.6, 1.7),
    "top_k": (5, 20),
    "top_p": (0.6, 0.95),
    "min_p": (0.02, 0.2),
    "typical_p": (0.5,),
    "repetition_penalty": (0.8, 1.4),
    "no_repeat_ngram_size": (2, 3),
    "bad_words_ids": ([[5], [9, 23]],),
    "suppress_tokens": ([3, 61],),
    "begin_suppress_tokens": ([12],),
    "min_new_tokens": (3, 9),
    "forced_eos_token_id": (96,),
    "exponential_decay_length_penalty": ((2, 1.3),),
    "renormalize_logits": (True,),
    "eos_token_id": ([96, 5, 9, 44, 60], 7),
}
OF_BEAMS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (0.3, -1.0, 2.0),
    "early_stopping": (True, "never"),
}


def random_settings(number: int) -> dict[str, Any]:
    """Settings of a call of `generate`, which their number determines."""
    rng = random.Random(number)
    beams, sampled = rng.choice([1, 1, 2, 4]), rng.random() < 0.5
    options = OPTIONS if beams == 1 else {**OPTIONS, **OF_BEAMS}
    chosen = {name: rng.choice(of) for name, of in options.items() if rng.random() < 1 / 3}
    if not sampled:
        chosen = {name: one for name, one in chosen.items() if name not in SAMPLED_ONLY}
    several = beams if beams > 1 else 3 if sampled else 1
    return {
        **QUIET,
        **chosen,
        "num_beams": beams,
        "do_sample": sampled,
        "num_return_sequences": rng.randint(1, several),
        "max_new_tokens": rng.randint(9, 20),
        "pad_token_id": 95,  # the beams of transformers take 0 for none
    }


SAMPLED_ONLY = ("temperature", "top_k", "top_p", "min_p", "typical_p")


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 10))]
)
def test_random_settings_of_mamba_give_the_references_results(block: int) -> None:
    both = pair("mamba")
    for number in range(10 * block, 10 * block + 10):
        given = {**random_settings(number), "attention_mask": MASK}
        shown = {"output_scores": True, "return_dict_in_generate": True}
        torch.manual_seed(number)
        expected = both.reference.generate(PROMPTS, **given, **shown)
        torch.manual_seed(number)
        found = both.model.generate(PROMPTS, **given, **shown)
        assert torch.equal(found.sequences, expected.sequences), given
        for one, other in zip(found.scores, expected.scores, strict=True):
            # transformers rounds to float32 what the head says.
            assert torch.equal(one.isfinite(), other.isfinite()), given
            assert torch.allclose(one.nan_to_num(), other.nan_to_num().to(one), atol=1e-5), given


def test_hidden_states_of_mamba_begin_with_the_embeddings() -> None:
    """transformers' begin after the first layer, and have the last before its norm too."""
    both = pair("mamba")
    shown = {"output_hidden_states": True, "return_dict_in_generate": True, **QUIET}
    found = both.model.generate(PROMPTS[:1], **shown).hidden_states[0]
    expected = both.reference.generate(PROMPTS[:1], **shown).hidden_states[0]
    table = both.reference.get_input_embeddings()
    with torch.no_grad():
        assert torch.equal(found[0], table(PROMPTS[:1]))
    assert len(found) == len(expected)
    for ours_, theirs in (*zip(found[1:-1], expected[:-2], strict=True), (found[-1], expected[-1])):
        assert farthest(ours_, theirs) < 1e-6
