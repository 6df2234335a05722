"""Heads and tables of embeddings as checkpoints hold them: tied, apart, under either name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import everystep as es
from everystep.errors import FormatError
from everystep.models import build_model
from tests.models.tiny import Tensors, farthest, ids, reference_decoder, with_norms

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
each_executor = pytest.mark.parametrize("executor", ["torch", "native"])


def stored(folder: Path, tied: bool) -> dict[str, Tensor]:
    """The tensors of a folder that transformers wrote; a tied head is not among them."""
    reference = with_norms(reference_decoder("llama", torch.float32, tie_word_embeddings=tied))
    reference.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def agree(folder: Path, executor: Any) -> es.LanguageModel:
    """Both libraries read the folder and compute the same; ours is returned."""
    model = es.load_model(folder, executor=executor)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = ids(2, 9)
    with torch.no_grad():
        assert farthest(model(read).logits, reference(read).logits) < 1e-5
    given = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(read, **given), reference.generate(read, **given))
    return model


@each_executor
def test_a_tied_head_that_is_stored_too_is_the_table(executor: Any, tmp_path: Path) -> None:
    tensors = stored(tmp_path, tied=True)
    save_file({**tensors, HEAD: tensors[TABLE].clone()}, tmp_path / "model.safetensors")
    assert agree(tmp_path, executor).has_tied_head


@each_executor
def test_a_tied_head_with_values_of_its_own_counts(executor: Any, tmp_path: Path) -> None:
    tensors = stored(tmp_path, tied=True)
    other = torch.randn(tensors[TABLE].shape)
    save_file({**tensors, HEAD: other}, tmp_path / "model.safetensors")
    model = agree(tmp_path, executor)
    assert not model.has_tied_head
    assert torch.equal(model.state_dict()[HEAD], other)
    assert torch.equal(model.state_dict()[TABLE], tensors[TABLE])


@each_executor
def test_the_table_may_be_stored_as_the_head(executor: Any, tmp_path: Path) -> None:
    tensors = stored(tmp_path, tied=True)
    table = tensors.pop(TABLE)
    save_file({**tensors, HEAD: table}, tmp_path / "model.safetensors")
    model = agree(tmp_path, executor)
    assert model.has_tied_head
    assert torch.equal(model.state_dict()[TABLE], table)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [96, 104])
def test_a_head_of_other_rows_than_the_table_is_refused(
    tied: bool, rows: int, tmp_path: Path
) -> None:
    """transformers refuses it too, whatever config.json says of the vocabulary."""
    tensors = stored(tmp_path, tied=tied)
    save_file({**tensors, HEAD: torch.randn(rows, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=rf"'lm_head\.weight' .*\(97, 48\); got \({rows}, 48\)"):
        es.load_model(tmp_path)
    with pytest.raises(RuntimeError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_model_without_either_is_told_what_is_missing() -> None:
    reference = reference_decoder("llama", torch.float32, tie_word_embeddings=True)
    tensors = {k: v for k, v in reference.state_dict().items() if k not in (TABLE, HEAD)}
    with pytest.raises(FormatError, match=r"missing: model\.embed_tokens\.weight"):
        build_model(reference.config.to_dict(), Tensors(tensors))
