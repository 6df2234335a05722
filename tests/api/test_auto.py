"""Loading under the familiar names gives what loading gives, and nothing asked for is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import ModelClassError, RequestError, UnknownArgumentError, UnsupportedError
from everystep.files.hub import HubAccess
from tests.cli.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("auto") / "model")


def test_model_and_tokenizer_are_those_that_load_gives(folder: Path) -> None:
    model, tokenizer = es.load(folder)
    auto = es.AutoModelForCausalLM.from_pretrained(folder)
    words = es.AutoTokenizer.from_pretrained(str(folder))
    assert words("some text")["input_ids"] == tokenizer("some text")["input_ids"]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(auto.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "auto"}, torch.float32),
        ({"dtype": torch.float64}, torch.float64),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": torch.float16, "torch_dtype": torch.float16}, torch.float16),
    ],
)
def test_the_type_may_be_given_in_every_familiar_way(
    folder: Path, given: dict[str, Any], dtype: torch.dtype
) -> None:
    assert es.AutoModelForCausalLM.from_pretrained(folder, **given).dtype == dtype


@pytest.mark.parametrize("device_map", ["cpu", torch.device("cpu"), {"": "cpu"}, None])
def test_a_device_may_be_given_in_every_familiar_way(folder: Path, device_map: Any) -> None:
    model = es.AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
    assert model.device == torch.device("cpu")


def test_auto_is_the_accelerator_if_there_is_one(folder: Path) -> None:
    model = es.AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_arguments_that_ask_for_nothing_else_are_accepted(folder: Path) -> None:
    es.AutoModelForCausalLM.from_pretrained(
        folder,
        low_cpu_mem_usage=True,
        use_safetensors=True,
        attn_implementation="sdpa",
        trust_remote_code=False,
        local_files_only=True,
    )
    es.AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"trust_remote_code": True}, UnsupportedError, "never run"),
        ({"use_safetensors": False}, UnsupportedError, "pickled weights are never read"),
        ({"attn_implementation": "flash_attention_2"}, UnsupportedError, "one attention"),
        ({"quantization_config": object()}, UnsupportedError, r"load\(path, quantize"),
        ({"device_map": {"model.layers.0": 0, "lm_head": 1}}, UnsupportedError, "several devices"),
        ({"device_map": "gpu"}, RequestError, "no device"),
        ({"dtype": "float31"}, RequestError, "no type of numbers"),
        ({"dtype": "float32", "torch_dtype": "float64"}, RequestError, "different things"),
        ({"device_mao": "cpu"}, UnknownArgumentError, "perhaps 'device_map'"),
        ({"revision": "v1"}, RequestError, "no revisions"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(
    folder: Path, given: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        es.AutoModelForCausalLM.from_pretrained(folder, **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"trust_remote_code": True}, "never run"), ({"paddingside": "left"}, "'padding_side'")],
)
def test_tokenizers_refuse_likewise(folder: Path, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        es.AutoTokenizer.from_pretrained(folder, **given)


def test_settings_of_a_tokenizer_may_be_given_when_it_is_loaded(folder: Path) -> None:
    tokenizer = es.AutoTokenizer.from_pretrained(
        folder, padding_side="right", pad_token="<|user|>", chat_template="x"
    )
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", "<|user|>")
    assert tokenizer.chat_template == "x"


def test_the_other_kind_of_model_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(RequestError, match="AutoModelForCausalLM"):
        es.AutoModelForSeq2SeqLM.from_pretrained(folder)


def test_the_configuration_has_the_defaults_of_its_family(folder: Path) -> None:
    config = es.AutoConfig.from_pretrained(folder)
    assert (config.hidden_size, config.model_type) == (16, "llama")
    assert config.is_encoder_decoder is False


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"])
def test_the_classes_only_load(name: str) -> None:
    with pytest.raises(ModelClassError, match="from_pretrained"):
        getattr(es, name)()


def test_a_tokenizer_of_the_hub_comes_without_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(hub_id: object, access: HubAccess, *, offline: bool) -> Path:
        asked.append((str(hub_id), access, offline))
        return folder

    monkeypatch.setattr("everystep.files.sources.fetch_from_hub", fetch)
    es.AutoTokenizer.from_pretrained(
        "org/name", revision="v1", cache_dir="there", token="secret", local_files_only=True
    )
    assert asked == [("org/name", HubAccess("v1", "there", "secret", weights=False), True)]


def test_moving_a_model_moves_the_model_itself(folder: Path) -> None:
    model = es.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    before = model.generate(ids, max_new_tokens=5)
    assert model.to("cpu", torch.float64) is model
    assert model.dtype == torch.float64
    assert torch.equal(model.generate(ids, max_new_tokens=5), before)


def test_embeddings_for_a_prompt_come_from_the_model(folder: Path) -> None:
    model = es.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    embeds = model.get_input_embeddings()(ids)
    found = model.generate(inputs_embeds=embeds, max_new_tokens=5)
    assert torch.equal(found, model.generate(ids, max_new_tokens=5)[:, 3:])
