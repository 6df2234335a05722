"""A folder of an unknown family is told which families there are, and what else it can do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

import everystep as es
from everystep.errors import UnsupportedError
from everystep.models.families import MODULES, intended_family

MISSPELT = {
    "lama": "llama",
    "Llama": "llama",
    "llamma": "llama",
    "mistal": "mistral",
    "misrtal": "mistral",
    "qwen-3": "qwen3",
    "Qwen_2": "qwen2",
    "gemma3text": "gemma3_text",
    "gema2": "gemma2",
    "star_coder2": "starcoder2",
    "smolllm3": "smollm3",
    "T5": "t5",
}
OTHERS = (
    "bert",
    "mamba2",
    "phimoe",
    "gemma",
    "llama4",
    "mllama",
    "ministral",
    "qwen3_next",
    "t6",
    "gemma3n_text",
    "minstrel",
    "3",
    "",
)


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_family_is_recognised(name: str) -> None:
    assert intended_family(name) == MISSPELT[name]


@pytest.mark.parametrize("name", OTHERS)
def test_another_family_is_not_taken_for_a_misspelt_one(name: str) -> None:
    assert intended_family(name) is None


def test_no_family_of_transformers_is_taken_for_a_misspelt_one() -> None:
    kinds = [str(kind) for kind in CONFIG_MAPPING if kind not in MODULES]
    assert len(kinds) > 300
    assert {kind: found for kind in kinds if (found := intended_family(kind))} == {}


def test_an_unknown_family_is_told_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UnsupportedError) as caught:
        es.load_model(tmp_path)
    for part in ("'bert'", *MODULES, "everystep.wrap", "everystep[transformers]"):
        assert part in str(caught.value)
    assert "meant" not in str(caught.value)


def test_a_misspelt_family_is_told_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    with pytest.raises(UnsupportedError, match="Perhaps you meant 'llama'"):
        es.load_model(tmp_path)
