"""A model that reads pictures works without its tower, from whatever folder holds its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import everystep as es
from everystep.api.load import from_weights
from everystep.errors import FormatError, RequestError
from everystep.models.load import weight_digest
from everystep.testing.models import tiny_llama
from tests.models.pictures import OWN, reference_of
from tests.models.tiny import farthest

IDS = torch.tensor([[7, 3, 9, 12, 5, 8], [0, 0, 4, 11, 6, 2]])
MASK = (IDS > 0).long()
VISION = ("vision",)
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


def generated(model: Any, **more: Any) -> list[list[int]]:
    given = {"attention_mask": MASK, "pad_token_id": 0, **GREEDY, **more}
    rows: list[list[int]] = model.generate(IDS, **given).tolist()
    return rows


@pytest.mark.parametrize("kind", OWN)
def test_a_folder_whose_tower_was_replaced_is_loaded(kind: str, tmp_path: Path) -> None:
    reference = reference_of(kind)
    expected = generated(reference)
    reference.model.visual = nn.Identity()
    reference.save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"nothing of the model's vision.*\n?.*without=\('vis"):
        es.load_model(tmp_path)
    model = es.load_model(tmp_path, dtype=torch.float64, without=VISION, executor="torch")
    assert model.config.model_type == f"{kind}_text"
    assert generated(model) == expected
    with pytest.raises(RequestError, match="pixel_values"):
        model.generate(IDS, pixel_values=torch.zeros(4, 96), max_new_tokens=1)


@pytest.mark.parametrize("kind", OWN)
def test_nothing_of_a_tower_is_read(kind: str) -> None:
    reference = reference_of(kind)

    class Source(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            assert "visual" not in name
            return super().__getitem__(name)

    weights = Source(reference.state_dict())
    assert any("visual" in name for name in weights)
    config = reference.config.to_dict()
    model = from_weights(config, weights, dtype=torch.float64, without=VISION)
    assert generated(model) == generated(reference)


@pytest.mark.parametrize("kind", OWN)
def test_embeddings_positions_and_features_are_read_as_before(kind: str) -> None:
    reference = reference_of(kind)
    config, weights = reference.config.to_dict(), reference.state_dict()
    whole = from_weights(config, weights, dtype=torch.float64)
    alone = from_weights(config, weights, dtype=torch.float64, without=VISION)
    embeds = torch.randn(1, 6, reference.config.text_config.hidden_size, dtype=torch.float64)
    axes = torch.tensor([[0, 1, 2, 2, 2, 5], [0, 1, 2, 2, 3, 5], [0, 1, 2, 3, 2, 5]])[:, None]
    given: dict[str, Any] = {"inputs_embeds": embeds, "position_ids": axes}
    depth = whole.core.spec.deepstack
    assert alone.core.spec.deepstack == depth == (2 if kind.startswith("qwen3") else 0)
    with torch.no_grad():
        expected = reference(**given).logits
    assert farthest(alone(**given).logits, expected) < 1e-9
    if depth:
        deep = torch.randn(1, 6, depth, embeds.shape[-1], dtype=torch.float64)
        found = [
            one.generate(inputs_embeds=embeds, position_ids=axes, deepstack=deep, **GREEDY)
            for one in (whole, alone)
        ]
        assert found[0].tolist() == found[1].tolist()


def test_the_text_part_saved_alone_is_a_model_where_its_head_is_tied(tmp_path: Path) -> None:
    for kind in ("qwen3_vl", "qwen3_vl_moe", "qwen2_vl"):
        reference = reference_of(kind)
        reference.lm_head.weight = reference.model.language_model.embed_tokens.weight
        text = reference.model.language_model
        text.config.tie_word_embeddings = True
        text.save_pretrained(tmp_path / kind)
        model = es.load_model(tmp_path / kind, dtype=torch.float64)
        assert generated(model) == generated(reference)


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    reference_of("qwen3_vl", torch.float32).save_pretrained(tmp_path / "whole")
    model = es.load_model(tmp_path / "whole", without=VISION)
    assert "native" in model.runs_on
    model.save_pretrained(tmp_path / "text")
    again = es.load_model(tmp_path / "text")
    assert weight_digest(again.core) == weight_digest(model.core)
    assert generated(again) == generated(model)


def test_a_configuration_without_a_tower_says_how_its_text_is_loaded() -> None:
    reference = reference_of("qwen3_vl")
    config = {**reference.config.to_dict(), "vision_config": None}
    text = {name: one for name, one in reference.state_dict().items() if "visual" not in name}
    with pytest.raises(FormatError, match=r"no vision_config.*without=\('vision',\)"):
        from_weights(config, text)
    model = from_weights(config, text, dtype=torch.float64, without=VISION)
    assert generated(model) == generated(reference)


def test_a_part_that_cannot_be_left_out_is_refused(tmp_path: Path) -> None:
    reference = reference_of("qwen3_vl")
    config, weights = reference.config.to_dict(), reference.state_dict()
    with pytest.raises(RequestError, match="'vision'"):
        from_weights(config, weights, without=("audio",))
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(RequestError, match="type llama has no such part"):
        es.load_model(tmp_path, without=VISION)
    with pytest.raises(RequestError, match="no list of parts"):
        es.load_model(tmp_path, without="vision")
