"""Every call that the guide about switching lists as refused is an error in those words."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import EverystepError
from tests.models.tiny import ids, ours, reference_decoder, reference_mamba, reference_pair
from tests.switching.guide import refused

IDS = ids(2, 5)
HOLES = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
SQUARE = torch.ones(2, 1, 5, 5).tril()
PLACES = torch.arange(5).expand(2, 5)
OBJECT = {"return_dict_in_generate": True}


@cache
def model_of(family: str) -> LanguageModel:
    make = {"t5": reference_pair, "mamba": lambda _, dtype: reference_mamba(dtype)}
    return LanguageModel(ours(make.get(family, reference_decoder)(family, torch.float64)))


def generated(family: str, **given: Any) -> Any:
    if family == "t5":
        given["decoder_start_token_id"] = 0
    return model_of(family).generate(IDS, max_new_tokens=2, **given)


def called(family: str, **given: Any) -> Any:
    return model_of(family)(IDS, **given)


def loop(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    return input_ids


def saved(**given: Any) -> None:
    es.GenerationConfig(max_new_tokens=3).save_pretrained(Path("never-made"), **given)


def chunked() -> transformers.PreTrainedConfig:
    return transformers.Llama4TextConfig(num_hidden_layers=2)


def linear() -> transformers.PreTrainedConfig:
    return transformers.Qwen3NextConfig(num_hidden_layers=4)


CALLS: dict[str, tuple[Callable[[], Any], ...]] = {
    "`assistant_model` with an encoder beside a decoder": (
        lambda: generated("llama", assistant_model=model_of("t5")),
    ),
    "`assistant_early_exit` of Mamba": (lambda: generated("mamba", assistant_early_exit=1),),
    "a plain cache object for a model with an encoder": (
        lambda: generated("t5", past_key_values=es.DynamicCache()),
        lambda: generated("t5", past_key_values=es.QuantizedCache("everystep", [None] * 3)),
    ),
    "`custom_generate` with a list of seeds": (
        lambda: generated("llama", custom_generate=loop, seed=[3, 4]),
    ),
    "`position_ids` of a model with an encoder": (lambda: generated("t5", position_ids=PLACES),),
    "a 4-D `attention_mask` of a model with an encoder": (
        lambda: generated("t5", attention_mask=SQUARE),
    ),
    "`output_attentions` of an encoder over a mask with holes": (
        lambda: generated("t5", attention_mask=HOLES, output_attentions=True, **OBJECT),
    ),
    "`token_type_ids` of GPT-2, in `generate` and in `model(...)`": (
        lambda: generated("gpt2", token_type_ids=IDS),
        lambda: called("gpt2", token_type_ids=IDS),
    ),
    "a 4-D `attention_mask` in `model(...)`; `generate` reads one": (
        lambda: called("llama", attention_mask=SQUARE),
    ),
    "a cache object of transformers": (
        lambda: generated("llama", past_key_values=transformers.DynamicCache()),
        lambda: called("llama", past_key_values=transformers.DynamicCache()),
    ),
    "a cache object for Mamba": (
        lambda: generated("mamba", past_key_values=es.DynamicCache()),
        lambda: called("mamba", past_key_values=es.DynamicCache()),
    ),
    "`use_cache=True` in `model(...)` of Mamba": (lambda: called("mamba", use_cache=True),),
    '`cache_implementation` of Mamba, other than `"dynamic"`': (
        lambda: generated("mamba", cache_implementation="static"),
        lambda: generated("mamba", cache_implementation="quantized"),
    ),
    "`output_attentions`, `position_ids` or a mask with holes of Mamba": (
        lambda: generated("mamba", output_attentions=True, **OBJECT),
        lambda: generated("mamba", position_ids=PLACES),
        lambda: generated("mamba", attention_mask=HOLES),
        lambda: generated("mamba", attention_mask=SQUARE),
    ),
    "`DynamicCache(config=...)` of chunked or linear layers": (
        lambda: es.DynamicCache(config=chunked()),
        lambda: es.DynamicCache(config=linear()),
    ),
    '`cache_implementation="quantized"` of a model with sliding windows': (
        lambda: generated("mistral", cache_implementation="quantized"),
    ),
    "a `cache_config` with `nbits` of 1, 2 or 3": (
        lambda: generated("llama", cache_implementation="quantized", cache_config={"nbits": 2}),
    ),
    '`cache_implementation="offloaded"` or `"offloaded_static"`': (
        lambda: generated("llama", cache_implementation="offloaded"),
        lambda: generated("llama", cache_implementation="offloaded_static"),
    ),
    '`cache_implementation="paged"`': (lambda: generated("llama", cache_implementation="paged"),),
    "`custom_generate` with the name of a repository": (
        lambda: generated("llama", custom_generate="owner/name"),
    ),
    "`save_pretrained(push_to_hub=True)`": (lambda: saved(push_to_hub=True),),
    "an unknown argument of `save_pretrained`, such as `config_name`": (
        lambda: saved(config_name="other.json"),
    ),
    "`from_pretrained(force_download=True)` of a configuration": (
        lambda: es.GenerationConfig.from_pretrained("never-made", force_download=True),
    ),
    "`from_pretrained(proxies=...)` of a configuration": (
        lambda: es.GenerationConfig.from_pretrained("never-made", proxies={"https": "a"}),
    ),
}
ROWS = {call: (says, instead) for call, says, instead in refused("Calls")}


def test_each_row_of_the_guide_is_tried() -> None:
    assert {*CALLS} == {*ROWS}


@pytest.mark.parametrize("call", CALLS)
def test_a_refused_call_says_what_the_guide_says(call: str) -> None:
    for ask in CALLS[call]:
        with pytest.raises(EverystepError) as caught:
            ask()
        assert all(part in str(caught.value) for part in ROWS[call])
