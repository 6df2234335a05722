"""What users of transformers asked for in its issues, where no other test shows it by itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.executors.torch_executor import TorchExecutor
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Work

IDS = torch.tensor([[5, 6, 7, 8, 9]])
TOKENIZER = tiny_tokenizer(320)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(vocab_size=320)


def test_a_prompt_costs_the_logits_of_its_last_position_alone(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Work] = []
    run = TorchExecutor.run

    def noted(self: TorchExecutor, work: Work) -> Any:
        works.append(work)
        return run(self, work)

    monkeypatch.setattr(TorchExecutor, "run", noted)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}):
        works.clear()
        model.generate(IDS, max_new_tokens=3, eos_token_id=None, **options)
        assert works[0].counts.tolist() == [5]
        assert all((work.logits <= 1).all() for work in works)


def test_generating_leaves_a_learning_model_as_it_was() -> None:
    model = tiny_llama(vocab_size=320).requires_grad_()
    before = [weight.clone() for weight in model.parameters()]
    model.generate(IDS, max_new_tokens=3, num_beams=2)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    model(IDS, labels=IDS).loss.backward()
    for weight, old in zip(model.parameters(), before, strict=True):
        assert weight.requires_grad and weight.grad is not None and torch.equal(weight, old)


def test_a_chat_begins_with_one_begin_token(model: LanguageModel) -> None:
    twice = tiny_tokenizer(320)
    twice.chat_template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}"
    seen: list[list[int]] = []

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    es.chat(model, twice, "Hi", max_new_tokens=1, logits_processor=[noted])
    assert seen[0] == [twice.bos_token_id, *twice.encode("Hi")]


def test_one_prompt_that_ends_with_the_end_token_is_read_without_a_word(
    model: LanguageModel,
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.generate(IDS, eos_token_id=9, max_new_tokens=2)
        assert found[0, :5].tolist() == IDS[0].tolist() and found.shape[1] > 5
        es.generate(model, TOKENIZER, ["Hello<eos>", "You"], eos_token_id=2, max_new_tokens=2)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_may_leave_the_prompt_alone(model: LanguageModel, name: str) -> None:
    plain = model.generate(IDS, max_new_tokens=1, eos_token_id=None)
    said = torch.cat([plain[:, -1:], IDS], dim=1)  # what would come stands in the prompt
    options: dict[str, Any] = {"max_new_tokens": 1, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    out = model.generate(said, **{name: 2.0}, **options)
    assert torch.equal(out.scores[0], out.logits[0])
    out = model.generate(said, repetition_penalty=2.0, **options)
    assert not torch.equal(out.scores[0], out.logits[0])


@pytest.mark.parametrize(
    "options",
    [{"penalty_alpha": 0.6, "top_k": 3}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}],
)
def test_no_way_of_generating_is_code_of_a_repository(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    assert model.generate(IDS, max_new_tokens=3, **options).shape[1] > 5
