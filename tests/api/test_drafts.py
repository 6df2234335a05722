"""Drafts of a second model and of early layers: what comes out is what comes out without them."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import ModelClassError, RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
IDS = torch.tensor([[5, 9, 17, 40, 6, 9, 17], [3, 3, 3, 11, 12, 5, 9], [3, 7, 8, 7, 8, 7, 8]])
MASK = (IDS != 3).long()
ROWS = {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 24, "eos_token_id": None}
OUT = {"return_dict_in_generate": True}


@cache
def model() -> LanguageModel:
    return tiny_llama(seed=1, num_hidden_layers=3)


@cache
def assistant() -> LanguageModel:
    """A model that is right now and then: what it says is close to what the model says."""
    near = tiny_llama(seed=1, num_hidden_layers=3)
    near.requires_grad_()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in near.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += 0.12 * weight.std() * noise
    return near


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 8},
    "guided": {"guidance_scale": 1.5},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 12, "seed": 4},
    "several": {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3, "seed": 8},
    "penalties": {"do_sample": True, "top_k": 5, "frequency_penalty": 0.5, "seed": 6},
}
SCHEDULES = ("constant", "heuristic", "heuristic_transient", None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_of_an_assistant_change_nothing(way: str, schedule: str | None) -> None:
    options = {**ROWS, **WAYS[way], **OUT, "output_scores": True}
    plain = model().generate(**options)
    drafting: dict[str, Any] = {"assistant_model": assistant(), "num_assistant_tokens": 4}
    if schedule is not None:
        drafting["num_assistant_tokens_schedule"] = schedule
    drafted = model().generate(**options, **drafting)
    assert torch.equal(drafted.sequences, plain.sequences)
    if way != "penalties" and schedule is not None:
        assert drafted.speculation["accepted"] > 0
    if len(plain.scores) == len(drafted.scores):
        for one, other in zip(plain.scores, drafted.scores, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    options = {**ROWS, **OUT, "num_assistant_tokens_schedule": "constant"}
    options |= {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    out = model().generate(**options, assistant_model=model())
    # 24 tokens are 4 steps of 6 for each of three rows
    assert out.speculation["drafted"] == out.speculation["accepted"] == 3 * 20


def test_the_confidence_threshold_ends_drafts() -> None:
    options = {**ROWS, **OUT, "num_assistant_tokens_schedule": "constant"}
    options |= {"assistant_model": assistant(), "num_assistant_tokens": 6}
    counts = [
        model().generate(**options, assistant_confidence_threshold=one).speculation
        for one in (0.0, 0.4, 1.0)
    ]
    every, some, single = (one["drafted"] for one in counts)
    assert every > some > single
    rates = [one["accepted"] / one["drafted"] for one in counts]
    assert rates[1] > rates[0]


def test_heuristic_drafts_grow_while_they_are_right() -> None:
    options = {**ROWS, **OUT, "assistant_model": model(), "num_assistant_tokens": 1}
    options |= {"assistant_confidence_threshold": 0.0, "max_new_tokens": 60}
    steps = []
    for schedule in ("constant", "heuristic"):
        out = model().generate(**options, num_assistant_tokens_schedule=schedule)
        steps.append(60 - out.speculation["accepted"] / 3)
    # 1, 3, 5, ... against 1, 1, 1, ...
    assert steps == [30, 8]


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient"])
def test_heuristic_drafts_start_anew_with_every_call(schedule: str) -> None:
    drafter = tiny_llama(seed=1, num_hidden_layers=3)
    before = copy.copy(drafter.generation_config)
    options = {**ROWS, **OUT, "assistant_model": drafter, "num_assistant_tokens": 1}
    options |= {"assistant_confidence_threshold": 0.0, "num_assistant_tokens_schedule": schedule}
    first, second = (model().generate(**options).speculation for _ in range(2))
    assert 0 < first["drafted"] == second["drafted"]
    assert first["accepted"] == second["accepted"]
    assert drafter.generation_config == before


def test_the_assistants_own_configuration_says_how_it_drafts() -> None:
    near = assistant()
    near.generation_config.num_assistant_tokens = 1
    near.generation_config.num_assistant_tokens_schedule = "constant"
    try:
        out = model().generate(**ROWS, **OUT, assistant_model=near)
        assert out.speculation["drafted"] <= 3 * 24
        longer = model().generate(**ROWS, **OUT, assistant_model=near, num_assistant_tokens=6)
        assert longer.speculation["drafted"] > out.speculation["drafted"]
    finally:
        near.generation_config.num_assistant_tokens = None
        near.generation_config.num_assistant_tokens_schedule = None


def test_drafts_of_early_layers_change_nothing() -> None:
    for way in ("greedy", "sampled", "several"):
        options = {**ROWS, **WAYS[way], **OUT}
        plain = model().generate(**options)
        schedule = {"num_assistant_tokens_schedule": "constant", "num_assistant_tokens": 3}
        drafted = model().generate(**options, assistant_early_exit=2, **schedule)
        assert torch.equal(drafted.sequences, plain.sequences)
        assert drafted.speculation["drafted"] > 0


def test_early_layers_whose_rest_adds_nothing_are_always_right() -> None:
    quiet = tiny_llama(seed=1, num_hidden_layers=3)
    quiet.requires_grad_()
    with torch.no_grad():
        for name, weight in quiet.named_parameters():
            if name.startswith("model.layers.2.") and name.endswith(
                ("o_proj.weight", "down_proj.weight")
            ):
                weight.zero_()
    options = {**ROWS, **OUT, "num_assistant_tokens_schedule": "constant"}
    options |= {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}
    out = quiet.generate(**options, assistant_early_exit=2)
    assert out.speculation["drafted"] == out.speculation["accepted"] == 3 * 20
    wrong = quiet.generate(**options, assistant_early_exit=1)
    assert wrong.speculation["accepted"] < wrong.speculation["drafted"]


def test_texts_and_events_draft_too() -> None:
    lm = tiny_llama(seed=3, vocab_size=320)
    prompts = ["the tool was", " in it is", " that"]
    options: dict[str, Any] = {"max_new_tokens": 14, "do_sample": True, "seed": 5}
    drafting = {"assistant_model": lm, "num_assistant_tokens": 3}
    plain = es.generate(lm, TOKENIZER, prompts, **options)
    assert es.generate(lm, TOKENIZER, prompts, **options, **drafting) == plain
    seen = [e.token for e in es.stream(lm, TOKENIZER, prompts[0], **options)]
    assert [e.token for e in es.stream(lm, TOKENIZER, prompts[0], **options, **drafting)] == seen
    run = es.open(lm, TOKENIZER, prompts[0], **options, **drafting)
    assert [token for step in run for token in step.tokens] == seen
    run.rewind(4)
    assert [token for step in run for token in step.tokens] == seen[10:]
    assert list(run.tokens) == seen


def test_stops_hold_within_drafts() -> None:
    lm = tiny_llama(seed=3, vocab_size=320)
    plain = es.generate(lm, TOKENIZER, "the tool was", max_new_tokens=30)
    middle = plain[4:6]
    options: dict[str, Any] = {"max_new_tokens": 30, "stop_strings": [middle]}
    stopped = es.generate(lm, TOKENIZER, "the tool was", **options)
    drafting = {"assistant_model": lm, "num_assistant_tokens_schedule": "constant"}
    assert es.generate(lm, TOKENIZER, "the tool was", **options, **drafting) == stopped
    assert len(stopped) < len(plain)


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"assistant_model": object()}, ModelClassError, "assistant_model is not a model"),
        ({"assistant_model": tiny_llama(vocab_size=50)}, RequestError, "have to be translated"),
        ({"assistant_model": model(), "num_beams": 2}, RequestError, "num_beams > 1"),
        (
            {"assistant_model": model(), "penalty_alpha": 0.5, "top_k": 4},
            RequestError,
            "cannot be combined with penalty_alpha",
        ),
        (
            {"assistant_model": model(), "prompt_lookup_num_tokens": 3},
            RequestError,
            "both draft",
        ),
        ({"assistant_early_exit": 3}, RequestError, "leaves no layer out"),
        ({"assistant_tokenizer": TOKENIZER}, RequestError, "assistant_tokenizer is that of"),
        (
            {"assistant_model": model(), "assistant_tokenizer": TOKENIZER},
            RequestError,
            "no tokenizer",
        ),
        ({"is_assistant": True}, UnsupportedError, "is_assistant is not read: a model drafts"),
    ],
)
def test_what_cannot_draft_is_refused(
    options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        model().generate(**ROWS, **options)


@pytest.mark.parametrize(
    "name", ["num_assistant_tokens", "target_lookbehind", "assistant_lookbehind"]
)
def test_settings_of_drafts_without_any_are_told_of(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        model().generate(**ROWS, **{name: 3})
    given = {**ROWS, "assistant_model": model(), name: 3}
    if "lookbehind" in name:  # they say how other tokens are spelled
        with pytest.warns(UserWarning, match=f"{name} has no effect, as drafts are made of the"):
            model().generate(**given)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model().generate(**given)


def test_how_to_copy_without_copies_is_told_of() -> None:
    given = {**ROWS, "max_matching_ngram_size": 2}
    for other in ({}, {"assistant_model": model()}):
        with pytest.warns(UserWarning, match="max_matching_ngram_size has no effect, as no drafts"):
            model().generate(**given, **other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in ({"prompt_lookup_num_tokens": 3}, {"draft_corpus": es.Corpus([[5, 6, 7]])}):
            model().generate(**given, **source)
