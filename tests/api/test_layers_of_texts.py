"""What layers show in `es.generate`: hidden states and attentions of each prompt's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import GenerationConfig
from everystep.errors import RequestError, UnsupportedError
from everystep.testing.models import tiny_llama
from tests.models.tiny import ours, reference_pair

PROMPTS: list[list[int]] = [[5, 6, 7, 8, 9, 10], [11, 12], [20, 21, 22]]
ASKED: dict[str, Any] = {
    "output_hidden_states": True,
    "output_attentions": True,
    "return_dict_in_generate": True,
    "eos_token_id": None,
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": 5},
    "sampled": {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3},
    "drafted": {"max_new_tokens": 9, "prompt_lookup_num_tokens": 3},
    "contrastive": {"max_new_tokens": 4, "penalty_alpha": 0.6, "top_k": 3},
    "guided": {"max_new_tokens": 4, "guidance_scale": 1.5},
}


def close(found: tuple[Any, ...] | None, wanted: tuple[Any, ...], row: int) -> None:
    """Equal token by token and layer by layer to a row of a rectangle of one prompt."""
    assert found is not None and len(found) <= len(wanted)
    for mine, theirs in zip(found, wanted, strict=False):
        for one, other in zip(mine, theirs, strict=True):
            assert one.shape == other[row].shape
            assert torch.allclose(one, other[row], atol=1e-5)


@pytest.mark.parametrize("executor", ["native", "torch"])
@pytest.mark.parametrize("way", WAYS)
def test_each_text_has_what_a_rectangle_of_its_prompt_shows(way: str, executor: Any) -> None:
    made = tiny_llama(dtype=torch.float32)
    model = LanguageModel(made.core, made.generation_config, executor=executor)
    options = {**ASKED, **WAYS[way]}
    results = es.generate(model, None, PROMPTS, seed=[3, 4, 5], **options)
    for number, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        seed = {"seed": [3 + number]} if way == "sampled" else {}
        alone = model.generate(torch.tensor([prompt]), **options, **seed)
        for row, one in enumerate(result if isinstance(result, list) else [result]):
            assert list(one.tokens) == alone.new_tokens[row]
            assert len(one.hidden_states) == len(one.attentions) == len(one.tokens)
            close(one.hidden_states, alone.hidden_states, row)
            close(one.attentions, alone.attentions, row)
            assert one.hidden_states[0][0].shape[0] == len(prompt)


def test_they_are_those_of_the_decoder_beside_an_encoder() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = LanguageModel(ours(reference_pair("bart", torch.float64)), GenerationConfig())
    options = {**ASKED, "max_new_tokens": 3, "decoder_start_token_id": 3}
    (one,) = es.generate(model, None, PROMPTS[:1], **options)
    alone = model.generate(torch.tensor(PROMPTS[:1]), **options)
    close(one.hidden_states, alone.decoder_hidden_states, 0)
    close(one.attentions, alone.decoder_attentions, 0)


def test_they_are_ordinary_tensors_and_only_where_they_are_asked_for() -> None:
    model = tiny_llama()
    shows = {**ASKED, "output_attentions": None, "max_new_tokens": 2}
    plain = {"return_dict_in_generate": True, "max_new_tokens": 2, "eos_token_id": None}
    first, second = es.generate(model, None, PROMPTS[:2], options=[shows, plain])
    assert first.attentions is second.attentions is second.hidden_states is None
    assert first.tokens == es.generate(model, None, PROMPTS[0], **plain).tokens
    one = first.hidden_states[0][0]
    one.mul_(2)
    one.requires_grad_()
    (one * one).sum().backward()
    assert "Tensor" not in repr(first) and "tensor" not in repr(first)


def test_a_prompt_longer_than_a_step_is_shown_whole() -> None:
    model = tiny_llama(max_position_embeddings=4096)
    prompt = [5 + n % 40 for n in range(1500)]
    options = {**ASKED, "max_new_tokens": 2, "output_attentions": False}
    long, short = es.generate(model, None, [prompt, PROMPTS[0]], **options)
    assert [one[0].shape[0] for one in long.hidden_states] == [1500, 1]
    assert [one[0].shape[0] for one in short.hidden_states] == [6, 1]


def test_a_search_and_a_stream_say_where_layers_are_shown() -> None:
    model = tiny_llama()
    with pytest.raises(UnsupportedError, match=r"one hypothesis.*model.generate"):
        es.generate(model, None, PROMPTS, num_beams=2, **ASKED)
    with pytest.raises(UnsupportedError, match=r"not of an event.*es.generate"):
        es.stream(model, None, PROMPTS, **ASKED)
    with pytest.raises(RequestError, match="no effect where a tensor is returned"):
        es.generate(model, None, PROMPTS, output_attentions=True, return_dict_in_generate=False)


def test_a_chunk_size_beside_layers_is_told_and_changes_nothing() -> None:
    model, ids = tiny_llama(), torch.tensor([PROMPTS[0]])
    options = {**ASKED, "output_attentions": None, "max_new_tokens": 3}
    with pytest.warns(UserWarning, match="prefill_chunk_size has no effect beside output_hid"):
        chunked = model.generate(ids, prefill_chunk_size=2, **options)
    whole = model.generate(ids, **options)
    assert torch.equal(chunked.sequences, whole.sequences)
    for one, other in zip(chunked.hidden_states, whole.hidden_states, strict=True):
        assert all(map(torch.equal, one, other))
