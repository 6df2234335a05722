"""Assisted generation gives the tokens of transformers' own, in float64, at batch 1."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator

import everystep as es
from tests.bridge.families import model_of

PROMPTS = ([5, 6, 7, 8, 9, 5, 6], [11, 12, 11, 12, 11, 13], [21])


@cache
def assistant() -> Any:
    """The model, a little changed."""
    near = copy.deepcopy(model_of("llama"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in near.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight += 0.15 * weight.std() * noise
    return near


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' assistant reads everything anew, and processes its scores once.

    As it is, it goes on from a cache that holds other ids after a draft that was right as a whole,
    and applies each processor that its configuration names a second time.
    """
    generator = AssistedCandidateGenerator
    made = generator.__init__

    def start(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        self.logits_processor = []

    def forget(self: Any, input_ids: torch.Tensor, *_: Any, **__: Any) -> bool:
        self.assistant_kwargs["attention_mask"] = torch.ones_like(input_ids)
        self.assistant_kwargs.pop("position_ids", None)
        return self.assistant_kwargs.pop("past_key_values", None) is not None

    monkeypatch.setattr(generator, "__init__", start)
    monkeypatch.setattr(generator, "_update_past_and_masks", forget)


def drawn(number: int) -> dict[str, Any]:
    """Random settings, and how the assistant drafts, which is part of its own configuration."""
    draw = random.Random(number)
    settings = draw.randint(1, 6), draw.choice(["constant", "heuristic_transient"])
    given: dict[str, Any] = {
        "max_new_tokens": draw.randint(1, 24),
        "do_sample": draw.random() < 0.6,
    }
    if given["do_sample"]:
        given |= {"temperature": draw.choice([0.6, 1.0, 1.5]), "top_k": draw.choice([0, 7])}
    if draw.random() < 0.4:
        given["repetition_penalty"] = 1.3
    if draw.random() < 0.3:
        given["eos_token_id"] = draw.sample(range(32), 3)
    near = assistant().generation_config
    near.num_assistant_tokens, near.num_assistant_tokens_schedule = settings
    near.assistant_confidence_threshold = 0.0
    return given


@pytest.mark.parametrize(
    "block", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 25))]
)
def test_tokens_are_those_of_the_reference(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mend(monkeypatch)
    model, accepted = model_of("llama"), 0
    wrapped = es.wrap(model)
    for number in range(block * 20, (block + 1) * 20):
        ids = torch.tensor([PROMPTS[number % len(PROMPTS)]])
        given = {**drawn(number), "attention_mask": torch.ones_like(ids)}
        torch.manual_seed(number)
        expected = model.generate(ids, **given, assistant_model=assistant())
        torch.manual_seed(number)
        out = wrapped.generate(
            ids, **given, assistant_model=assistant(), return_dict_in_generate=True
        )
        assert out.sequences.tolist() == expected.tolist(), (number, given)
        accepted += out.speculation["accepted"]
    assert accepted > 40


def test_any_batch_is_that_without_drafts() -> None:
    wrapped = es.wrap(model_of("llama"))
    rows = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 11], [0, 21, 22, 21, 22]])
    given = {"attention_mask": (rows > 0).long(), "max_new_tokens": 20, "eos_token_id": None}
    given |= {"do_sample": True, "num_return_sequences": 2, "seed": 3, "pad_token_id": 0}
    plain = wrapped.generate(rows, **given)
    drafted = wrapped.generate(rows, **given, assistant_model=assistant())
    assert drafted.tolist() == plain.tolist()


def test_wrapped_layers_are_not_left_early() -> None:
    with pytest.raises(es.EverystepError, match="run as its own library runs them"):
        es.wrap(model_of("llama")).generate(torch.tensor([[5, 6]]), assistant_early_exit=1)


def test_an_assistant_with_an_encoder_is_refused_beside_a_decoder() -> None:
    with pytest.raises(es.EverystepError, match="nothing is brought for one to read"):
        es.wrap(model_of("llama")).generate(torch.tensor([[5, 6]]), assistant_model=model_of("t5"))


def test_an_assistant_whose_state_cannot_be_cut_back_is_refused() -> None:
    with pytest.raises(es.EverystepError, match="cannot be taken back"):
        es.wrap(model_of("llama")).generate(
            torch.tensor([[5, 6]]), assistant_model=model_of("mamba")
        )
