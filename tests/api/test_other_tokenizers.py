"""Assistants with another tokenizer: what comes out is what comes out without them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

LONG, SHORT = tiny_tokenizer(320), tiny_tokenizer(270)
PROMPTS = ["the tool was in the", " of it is to", "sing"]
OUT = {"return_dict_in_generate": True}


@cache
def model() -> LanguageModel:
    return tiny_llama(seed=2, vocab_size=320)


@cache
def assistant() -> LanguageModel:
    return tiny_llama(seed=4, vocab_size=270)


@cache
def writer() -> LanguageModel:
    """A model whose best tokens are letters and words."""
    found = tiny_llama(seed=2, vocab_size=320)
    found.requires_grad_()
    unseen = [one for one in range(320) if not LONG.decode([one]).strip(" ").isalpha()]
    unseen += LONG.all_special_ids
    with torch.no_grad():
        dict(found.named_parameters())["lm_head.weight"][unseen] = 0.0
    return found


def asked(other: LanguageModel, tokenizer: Any, **more: Any) -> dict[str, Any]:
    drafting = {"assistant_model": other, "assistant_tokenizer": tokenizer, "tokenizer": LONG}
    drafting |= {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant"}
    drafting |= {"assistant_confidence_threshold": 0.0}
    return {**LONG(PROMPTS, padding=True, return_tensors="pt"), **drafting, **OUT, **more}


@pytest.mark.parametrize("lookbehind", [2, 10])
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"repetition_penalty": 1.2},
        {"do_sample": True, "seed": 4},
        {"do_sample": True, "seed": 5, "top_k": 6, "num_return_sequences": 2},
    ],
)
def test_drafts_in_other_words_change_nothing(way: dict[str, Any], lookbehind: int) -> None:
    options = {**LONG(PROMPTS, padding=True, return_tensors="pt"), **OUT, **way}
    options |= {"max_new_tokens": 20, "eos_token_id": None}
    plain = model().generate(**options)
    looks = {"target_lookbehind": lookbehind, "assistant_lookbehind": lookbehind}
    drafted = model().generate(**{**options, **asked(assistant(), SHORT), **looks})
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.speculation["drafted"] > 0


def test_lookbehinds_are_told_of_where_both_have_one_tokenizer() -> None:
    given = asked(model(), tiny_tokenizer(320), max_new_tokens=2, target_lookbehind=5)
    with pytest.warns(UserWarning, match="target_lookbehind has no effect, as drafts are made of"):
        model().generate(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().generate(**{**given, **asked(assistant(), SHORT, max_new_tokens=2)})


def test_the_same_words_by_another_tokenizer_are_right() -> None:
    """A tokenizer with one token less makes other ids of no text here."""
    fewer = tiny_tokenizer(319)
    options = asked(writer(), fewer, max_new_tokens=20, eos_token_id=None)
    for way in ({}, {"do_sample": True, "seed": 3, "top_k": 3}):
        spoken = writer().generate(**options, **way).speculation
        assert spoken["accepted"] > 0.8 * spoken["drafted"] > 0


def test_equal_tokenizers_need_no_translation() -> None:
    options = asked(model(), tiny_tokenizer(320), max_new_tokens=20, eos_token_id=None)
    out = model().generate(**options)
    assert out.speculation["accepted"] == out.speculation["drafted"]


def test_texts_are_drafted_for_too() -> None:
    options: dict[str, Any] = {"max_new_tokens": 16, "seed": 3, "do_sample": True}
    plain = es.generate(model(), LONG, PROMPTS, **options)
    drafting = {"assistant_model": assistant(), "assistant_tokenizer": SHORT}
    assert es.generate(model(), LONG, PROMPTS, **options, **drafting) == plain
