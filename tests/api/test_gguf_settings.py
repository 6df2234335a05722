"""What a GGUF file says of generation: where texts end, and how tokens would be chosen."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

import everystep as es
from tests.files.gguf_writer import write_gguf
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import reference_decoder


def written(folder: Path, **keys: object) -> Path:
    """Write a tiny Llama whose vocabulary names two ends."""
    reference = reference_decoder("llama", torch.float32)
    tokens = [f"t{id}" for id in range(reference.config.vocab_size)]
    tokens[9] = "<|eot_id|>"
    kinds = [3 if id == 9 else 1 for id in range(len(tokens))]
    vocabulary = {"model": "gpt2", "tokens": tokens, "token_type": kinds, "eos_token_id": 4}
    known = {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
    everything = {**metadata("llama"), **known, **keys}
    return write_gguf(folder / "model.gguf", everything, converted(reference, "llama"))


def test_the_end_of_a_turn_ends_a_text(tmp_path: Path) -> None:
    model = es.load_model(written(tmp_path))
    assert model.generation_config.eos_token_id == [4, 9]

    def ends(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, 9 if ids.shape[1] == 5 else 20] = 0
        return chosen

    answer = model.generate(torch.tensor([[1, 2, 3]]), logits_processor=[ends], max_new_tokens=8)
    assert answer.tolist() == [[1, 2, 3, 20, 20, 9]]


def test_proposals_for_sampling_are_named_in_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path, **{"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = es.load_model(path)
    (one,) = [one for one in caught if "proposes" in str(one.message)]
    assert "general.sampling.temp = 0.5, general.sampling.top_k = 20" in str(one.message)
    assert one.filename == __file__
    assert model.generation_config.temperature is None
