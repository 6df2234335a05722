"""Folders whose files hold impossible values: each is one of our errors before the first token, and
harms no model that is loaded already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL = tiny_llama(vocab_size=320, dtype=torch.float32)
HUGE, DIGITS = 10**399, "9" * 5000  # beyond floats; beyond what Python reads as a number
CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"

Wrong = tuple[str, str, Any]


def each(file: str, key: str, *values: Any) -> list[Wrong]:
    return [(file, key, value) for value in values]


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
WRONG: list[Wrong] = [
    *(one for key in SIZES for one in each(CONFIG, key, HUGE, "abc", [1], 1e300, -1, True, {})),
    *each(CONFIG, "vocab_size", HUGE, "abc", [1], 1e300, -1, {}),
    *each(CONFIG, "rms_norm_eps", HUGE, "abc", [1], -1, True, {}),
    *each(CONFIG, "rope_theta", HUGE, "abc", [1], -1, True, {}),
    *each(CONFIG, "max_position_embeddings", HUGE, "abc", [1], 1e300, -1, 0, True, {}),
    *each(
        CONFIG,
        "rope_scaling",
        5,
        "yarn",
        {"rope_type": 5},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": HUGE},
        {"rope_type": "linear", "factor": "2"},
        {"rope_type": "yarn", "factor": HUGE, "original_max_position_embeddings": 10},
        {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 10**30},
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 10,
            "beta_slow": 1e-300,
        },
        {
            "rope_type": "longrope",
            "factor": 2,
            "short_factor": [1e300],
            "long_factor": [0],
            "original_max_position_embeddings": 10,
        },
    ),
    *each(GENERATION, "eos_token_id", "a", 1.5, [[1]], {"a": 1}, 2**63),
    *each(GENERATION, "pad_token_id", "a", 1.5, 2**63, -(2**63) - 1),
    *each(GENERATION, "num_beams", 10**29, HUGE, 0, "2", [2]),
    *each(GENERATION, "repetition_penalty", HUGE, 0, "1.0"),
    *each(GENERATION, "temperature", -1, HUGE, "hot"),
    *each(GENERATION, "top_k", HUGE, -1, "50", 1.5),
    *each(GENERATION, "max_length", HUGE, -1, "10"),
    *each(
        GENERATION,
        "sequence_bias",
        {"²": 1.0},
        {DIGITS: 1.0},
        {"5": HUGE},
        {"": 1.0},
        {"(5,)": 1e300},
        [[[5], -1e39]],
        {"007": 1.0},
        [[["a"], 1]],
        5,
    ),
    *each(GENERATION, "bad_words_ids", [[2**70]], [["a"]], [[]], 5),
    *each(GENERATION, "suppress_tokens", [2**70], ["a"], "abc"),
    *each(GENERATION, "stop_strings", [5], 5),
    *each(GENERATION, "forced_eos_token_id", "a", 2**70),
    *each(TOKENIZER, "additional_special_tokens", 5, [5], "abc", True),
    *each(TOKENIZER, "extra_special_tokens", 5, [5]),
    *each(SPECIAL, "additional_special_tokens", 5, [5]),
    *each(SPECIAL, "additional_special_tokens", ["\ud800"]),
    *each(TOKENIZER, "additional_special_tokens", [{"content": "a\udfff"}]),
    *each(TOKENIZER, "eos_token", 5, ["a"], "\ud800"),
    *each(TOKENIZER, "chat_template", 5, [{"name": 5}]),
    *each(TOKENIZER, "model_max_length", "a", 0, -1, [1], True),
    *each(TOKENIZER, "padding_side", 5, "up"),
    *each(
        TOKENIZER,
        "added_tokens_decoder",
        5,
        [1],
        {"a": {"content": "x"}},
        {"²": {"content": "x"}},
        {DIGITS: {"content": "x"}},
        {"-1": {"content": "x"}},
        {"320": 5},
        {"320": {"content": 5}},
        {"320": {"content": "\ud800"}},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folders") / "good"
    MODEL.save_pretrained(made)
    tiny_tokenizer(320).save_pretrained(made)
    return made


def answer(folder: Path) -> str:
    model, tokenizer = es.load(folder)
    options = {"max_new_tokens": 2, "tokenizer": tokenizer}
    return str(model.generate(torch.tensor([[5, 6]]), **options).tolist())


def shown(wrong: Wrong) -> str:
    file, key, value = wrong
    text = "5,000 digits" if DIGITS in str(type(value) is dict and list(value)) else None
    return f"{file} {key} {text or json.dumps(value)[:60]}"


@pytest.mark.parametrize("wrong", WRONG, ids=shown)
def test_it_is_one_of_our_errors(wrong: Wrong, folder: Path, tmp_path: Path) -> None:
    file, key, value = wrong
    before = MODEL(torch.tensor([[5, 6, 7]])).logits
    broken = shutil.copytree(folder, tmp_path / "broken")
    path = broken / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, key: value}))
    with pytest.raises(EverystepError) as caught:
        answer(broken)
    assert key.split("_")[0] in str(caught.value) or "rows" in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert torch.equal(MODEL(torch.tensor([[5, 6, 7]])).logits, before)


def test_a_generation_config_is_of_the_size_that_people_write(folder: Path, tmp_path: Path) -> None:
    large = shutil.copytree(folder, tmp_path / "large")
    (large / GENERATION).write_text(json.dumps({"bad_words_ids": [[5]] * 300_000}))
    with pytest.raises(EverystepError, match="too large; wanted at most 1048576 bytes"):
        answer(large)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        (TOKENIZER, "model_max_length", 1e30),
        (TOKENIZER, "model_max_length", 512),
        (GENERATION, "sequence_bias", {"(5, 6)": 1.0}),
        (GENERATION, "pad_token_id", -5),
        (GENERATION, "eos_token_id", 2**62),
        (CONFIG, "max_position_embeddings", None),
    ],
    ids=str,
)
def test_what_is_only_unusual_loads(
    file: str, key: str, value: Any, folder: Path, tmp_path: Path
) -> None:
    unusual = shutil.copytree(folder, tmp_path / "unusual")
    path = unusual / file
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, key: value}))
    assert answer(unusual)


def test_what_nothing_reads_in_a_folder_is_told_once(folder: Path, tmp_path: Path) -> None:
    strange = shutil.copytree(folder, tmp_path / "strange")
    for file, key in ((GENERATION, "temprature"), (TOKENIZER, "padding_sides")):
        path = strange / file
        path.write_text(json.dumps({**json.loads(path.read_text()), key: 1}))
    with pytest.warns(UserWarning) as caught:
        model, tokenizer = es.load(strange)
    told = [str(one.message) for one in caught if "runs on torch" not in str(one.message)]
    assert len(told) == 2
    assert f"{GENERATION} has names that nothing reads; got 'temprature'" in told[0]
    assert f"{TOKENIZER} has keys without effect here; got 'padding_sides'" in told[1]
    # Another step, or another folder, says nothing more.
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    assert es.generate(model, tokenizer, "a", max_new_tokens=2) is not None
    assert json.loads((tmp_path / "again" / GENERATION).read_text())["temprature"] == 1
