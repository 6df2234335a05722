"""Names of other libraries and engines: each is answered with what stands for it here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.config.foreign_names import ADVICE, SAME, WEIGHTS
from everystep.errors import EverystepError, RequestError, UnknownArgumentError
from everystep.requests.door import KEYWORDS
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

MODEL, TOKENIZER = tiny_llama(vocab_size=320), tiny_tokenizer(320)


def test_what_names_stand_for_exists_and_the_names_are_none_of_ours() -> None:
    assert set(SAME.values()) <= set(KEYWORDS)
    assert not {*SAME, *ADVICE} & set(KEYWORDS) and not set(SAME) & set(ADVICE)
    assert set(WEIGHTS.values()) <= {"int4", "int8"}


@pytest.mark.parametrize("name", [*SAME, *ADVICE])
def test_every_way_to_generate_answers_them(name: str) -> None:
    given: dict[str, Any] = {name: True}
    wanted = ADVICE.get(name) or f"Perhaps you meant {SAME[name]} instead of {name}"
    for ask in (
        lambda: es.generate(MODEL, TOKENIZER, "Hi", **given),
        lambda: es.stream(MODEL, TOKENIZER, "Hi", **given),
        lambda: MODEL.generate(torch.tensor([[1, 2]]), **given),
        lambda: es.GenerationConfig(**given),
    ):
        with pytest.raises(UnknownArgumentError) as raised:
            ask()
        assert wanted in str(raised.value)


def test_a_stream_is_another_call() -> None:
    with pytest.raises(UnknownArgumentError, match=r"Call es\.stream, or es\.chat"):
        es.generate(MODEL, TOKENIZER, "Hi", stream=True)  # type: ignore[call-overload]


@pytest.mark.parametrize("call", [es.load, es.load_model])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"load_in_4bit": True}, 'quantize="int4"'),
        ({"load_in_8bit": True}, 'quantize="int8"'),
        ({"torch_dtype": torch.float32}, "Pass dtype="),
        ({"device_map": "auto"}, "Pass device="),
        ({"quantise": "int4"}, "Perhaps you meant quantize"),
        ({"trust": True}, "Leave trust out"),
        ({"quantize": "q4_k_m"}, "Write a GGUF file with es.quantize"),
        ({"quantize": "4bit"}, "Pass quantize='int4'"),
        ({"quantize": "awq"}, "Pass quantize='int4'"),
        ({"cache_dtype": "q8_0"}, "Leave cache_dtype out"),
    ],
)
def test_loading_answers_them(call: Any, given: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as raised:
        call(tmp_path, **given)
    assert told in str(raised.value)


def test_from_pretrained_answers_them() -> None:
    with pytest.raises(EverystepError, match="int4"):
        es.AutoModelForCausalLM.from_pretrained("anything", load_in_4bit=True)
