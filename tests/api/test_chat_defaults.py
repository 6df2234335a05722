"""How a chat is answered where neither the caller nor the model says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api import chat_defaults
from everystep.api.chat_defaults import ChatDefaults, chat_defaults_of
from everystep.config import GenerationConfig
from everystep.files.sources import DEFAULT_MODEL
from everystep.requests.door import KEYWORDS
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

USER = {"role": "user", "content": "Hi"}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("options", "own", "expected"),
    [
        ({}, {}, {"max_new_tokens": 512, **SAMPLED}),
        ({"max_new_tokens": 3}, {}, {"max_new_tokens": 3, **SAMPLED}),
        ({"max_length": 30}, {}, {"max_length": 30, **SAMPLED}),
        ({}, {"repetition_penalty": 1.1}, {"max_new_tokens": 512, **SAMPLED}),
        ({}, {"temperature": 0.6}, {"max_new_tokens": 512}),
        ({}, {"do_sample": False}, {"max_new_tokens": 512}),
        ({"do_sample": False}, {}, {"max_new_tokens": 512, "do_sample": False}),
        ({"num_beams": 2}, {}, {"max_new_tokens": 512, "num_beams": 2}),
        ({"strategy": "beam"}, {}, {"max_new_tokens": 512, "strategy": "beam"}),
        ({"penalty_alpha": 0.6, "top_k": 4}, {"min_p": 0.1}, {"max_new_tokens": 512}),
    ],
)
def test_what_is_left_open_is_completed(
    options: dict[str, Any], own: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = ChatDefaults().completed(options, GenerationConfig(**own))
    assert found == {**expected, **options}


def test_a_configuration_that_is_passed_says_it_too() -> None:
    passed = {"generation_config": GenerationConfig(top_k=3, max_new_tokens=9)}
    assert ChatDefaults().completed(passed, GenerationConfig()) == passed


def test_a_conversation_begins_with_the_system_message_unless_it_has_one() -> None:
    defaults = ChatDefaults("Be brief.")
    begun = [{"role": "system", "content": "Be brief."}, USER]
    assert defaults.begun([USER]) == begun
    assert defaults.begun(begun) == begun
    assert ChatDefaults().begun([USER]) == [USER]


def test_the_default_model_has_its_own() -> None:
    assert chat_defaults_of(DEFAULT_MODEL.upper()) == chat_defaults.KNOWN[DEFAULT_MODEL]
    for other in ("org/name", "a.gguf", 5, None):
        assert chat_defaults_of(other) == ChatDefaults()


def test_every_option_that_decides_exists() -> None:
    assert set(chat_defaults._CHOOSES) <= set(KEYWORDS)


def test_a_chat_is_sampled_and_messages_are_not() -> None:
    model, tokenizer = tiny_llama(vocab_size=320, dtype=torch.float32), tiny_tokenizer(320)
    options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
    greedy = es.generate(model, tokenizer, [USER], **options)
    answers = {es.chat(model, tokenizer, "Hi", seed=seed, **options) for seed in range(6)}
    assert len(answers) > 2
    wanted = es.generate(model, tokenizer, [USER], seed=3, **SAMPLED, **options)
    assert es.chat(model, tokenizer, "Hi", seed=3, **options) == wanted
    assert es.chat(model, tokenizer, "Hi", do_sample=False, **options) == greedy


@pytest.mark.model
def test_the_default_model_knows_the_capital_of_france() -> None:
    model, tokenizer = es.load(dtype=torch.float32)
    assert "Paris" in es.chat(model, tokenizer, "What is the capital of France?", max_new_tokens=12)
