"""Every wrong call is refused before any compute, by an error that names what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.api.model import LanguageModel
from everystep.errors import (
    EverystepError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
)
from everystep.testing.models import tiny_llama

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])
EMBEDS = torch.zeros(2, 3, 16)

WRONG: list[tuple[str, dict[str, Any], type[EverystepError], list[str]]] = [
    ("misspelt", {"max_new_token": 5}, UnknownArgumentError, ["max_new_token", "max_new_tokens"]),
    ("unknown", {"wibble": 1}, UnknownArgumentError, ["wibble"]),
    ("twice", {"inputs": IDS}, RequestError, ["twice", "input_ids"]),
    ("float ids", {"input_ids": IDS.float()}, RequestError, ["input_ids", "integers", "float32"]),
    ("flat ids", {"input_ids": IDS[0]}, RequestError, ["(batch, length)", "(3,)"]),
    ("no ids", {"input_ids": IDS[:, :0]}, RequestError, ["input_ids", "(2, 0)"]),
    ("large id", {"input_ids": IDS + 1000}, RequestError, ["vocabulary", "1010"]),
    ("negative id", {"input_ids": IDS - 100}, RequestError, ["vocabulary", "-95"]),
    ("ragged ids", {"input_ids": [[5], [6, 7]]}, RequestError, ["rectangle", "attention_mask"]),
    (
        "mask shape",
        {"attention_mask": torch.ones(2, 4)},
        RequestError,
        ["attention_mask", "(2, 3)", "(2, 4)"],
    ),
    ("mask value", {"attention_mask": torch.full((2, 3), 2)}, RequestError, ["0 and 1", "2"]),
    (
        "mask hole",
        {"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])},
        RequestError,
        ["row 0", "hole", "[1, 0, 1]"],
    ),
    (
        "mask empty",
        {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])},
        RequestError,
        ["row 1", "empty"],
    ),
    (
        "flat embeddings",
        {"input_ids": None, "inputs_embeds": EMBEDS[0]},
        RequestError,
        ["inputs_embeds", "hidden", "(3, 16)"],
    ),
    (
        "embeddings and ids",
        {"inputs_embeds": EMBEDS[:, :2]},
        RequestError,
        ["inputs_embeds and input_ids", "(2, 2)"],
    ),
    (
        "positions",
        {"position_ids": torch.arange(5)[None]},
        RequestError,
        ["position_ids", "(1, 5)"],
    ),
    ("nothing", {"input_ids": None, "bos_token_id": None}, RequestError, ["start from"]),
    ("full", {"max_length": 3}, RequestError, ["no room", "max_length=3", "3 positions"]),
    ("no tokens", {"max_new_tokens": 0}, RequestError, ["max_new_tokens", "0"]),
    ("cold", {"do_sample": True, "temperature": 0.0}, RequestError, ["temperature", "do_sample"]),
    ("top_p", {"do_sample": True, "top_p": 2.0}, RequestError, ["top_p", "2.0"]),
    ("top_k", {"do_sample": True, "top_k": -1}, RequestError, ["top_k", "-1"]),
    ("beams", {"num_beams": 0}, RequestError, ["num_beams", "0"]),
    (
        "returns",
        {"num_beams": 2, "num_return_sequences": 3},
        RequestError,
        ["num_return_sequences", "num_beams"],
    ),
    ("greedy returns", {"num_return_sequences": 2}, RequestError, ["num_return_sequences"]),
    (
        "early",
        {"num_beams": 2, "early_stopping": "maybe"},
        RequestError,
        ["early_stopping", "never", "maybe"],
    ),
    ("strings", {"stop_strings": ["."]}, RequestError, ["stop_strings", "tokenizer"]),
    ("streamer", {"num_beams": 2, "streamer": object()}, UnsupportedError, ["streamer", "beams"]),
    (
        "lookup",
        {"num_beams": 2, "prompt_lookup_num_tokens": 3},
        RequestError,
        ["prompt_lookup_num_tokens", "num_beams"],
    ),
    ("seed", {"seed": "seven"}, RequestError, ["seed", "seven"]),
    ("seeds", {"seed": [1, 2, 3]}, RequestError, ["seed", "[1, 2, 3]", "2 of them"]),
    ("negative", {"negative_prompt_ids": IDS}, RequestError, ["guidance_scale"]),
    (
        "negative mask",
        {"negative_prompt_attention_mask": torch.ones(2, 3)},
        RequestError,
        ["negative_prompt_ids"],
    ),
    (
        "negative rows",
        {"negative_prompt_ids": IDS[:1], "guidance_scale": 2.0},
        RequestError,
        ["negative_prompt_ids", "rows"],
    ),
    (
        "guided embeddings",
        {"input_ids": None, "inputs_embeds": EMBEDS, "guidance_scale": 2.0},
        RequestError,
        ["guidance_scale", "negative_prompt_ids"],
    ),
    ("decoder", {"decoder_input_ids": IDS}, RequestError, ["decoder_input_ids", "encoder"]),
    ("assistant", {"assistant_model": object()}, UnsupportedError, ["assistant_model"]),
    ("remote", {"custom_generate": "some/repository"}, UnsupportedError, ["custom_generate"]),
    (
        "later",
        {"cache_implementation": "static"},
        UnsupportedError,
        ["cache_implementation", "static"],
    ),
    ("cache", {"past_key_values": object()}, UnsupportedError, ["past_key_values"]),
]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(hidden_size=16)


@pytest.mark.parametrize(
    ("arguments", "error", "parts"),
    [pytest.param(*rest, id=name) for name, *rest in WRONG],
)
def test_a_wrong_call_is_refused_with_what_to_do(
    model: LanguageModel,
    arguments: dict[str, Any],
    error: type[EverystepError],
    parts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def computes(*_: object) -> None:
        raise AssertionError("the call reached the executor")

    monkeypatch.setattr(LanguageModel, "executor", computes)
    given = {"input_ids": IDS, **arguments}
    with pytest.raises(error) as caught:
        model.generate(**given)
    for part in parts:
        assert part in str(caught.value)


def test_a_refused_call_leaves_the_model_usable(model: LanguageModel) -> None:
    before = model.generate(IDS, max_new_tokens=4)
    with pytest.raises(RequestError):
        model.generate(IDS, max_new_tokens=0)
    assert torch.equal(model.generate(IDS, max_new_tokens=4), before)
