"""`cache_dtype`: the type in which rows keep keys and values, chosen with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.cache.formats import CacheDtype
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.choice import ExecutorName
from everystep.testing.models import tiny_llama
from tests.executors.models import narrow_model
from tests.models.tiny import ours, reference_t5

IDS = torch.arange(4, 34)[None]
EXECUTORS: list[Any] = ["torch", pytest.param("native", marks=pytest.mark.native)]
WAYS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3},
    {"do_sample": True, "num_return_sequences": 3, "seed": 4},
    {"prompt_lookup_num_tokens": 3},
    {"penalty_alpha": 0.4, "top_k": 4},
]


def model_with(cache_dtype: CacheDtype | None, executor: ExecutorName = "auto") -> LanguageModel:
    core = narrow_model("llama", None)
    return LanguageModel(core, executor=executor, cache_dtype=cache_dtype)


def say(model: LanguageModel, ids: torch.Tensor = IDS, **options: Any) -> Any:
    given = {"max_new_tokens": 12, "min_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 3}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_the_cache_is_invisible(
    way: dict[str, Any], cache_dtype: CacheDtype, executor: ExecutorName
) -> None:
    model = model_with(cache_dtype, executor)
    whole = say(model, **way)
    assert torch.equal(say(model, prefill_chunk_size=4, **way), whole)
    if "penalty_alpha" not in way and "prompt_lookup_num_tokens" not in way:
        assert torch.equal(say(model, use_cache=False, **way), whole)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("cache_dtype", ["float16", "int8"])
def test_a_cache_object_goes_on(cache_dtype: CacheDtype, executor: ExecutorName) -> None:
    model = model_with(cache_dtype, executor)
    first = say(model, return_dict_in_generate=True)
    past = first.past_key_values
    assert past.layers[0].keys.dtype == model.dtype
    whole = torch.cat([first.sequences, IDS[:, :5]], dim=1)
    assert torch.equal(say(model, whole, past_key_values=past), say(model, whole))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_is_kept_is_what_is_computed_with(executor: ExecutorName) -> None:
    chosen: tuple[CacheDtype | None, ...] = (None, "float32", "float16", "int8")
    asked = {"return_dict_in_generate": True, "output_logits": True}
    told = [say(model_with(one, executor), **asked) for one in chosen]
    exact, same, half, codes = (torch.stack(one.logits)[0] for one in told)
    assert torch.equal(exact, same)
    most = exact.abs().max()
    assert 0 < (half - exact).abs().max() < 0.01 * most
    assert (half - exact).abs().max() < (codes - exact).abs().max() < 0.1 * most


def test_the_model_shows_its_choice() -> None:
    assert model_with("int8").cache_dtype == "int8"
    assert model_with(None).cache_dtype == "float32"
    assert tiny_llama().cache_dtype == "float64"


# --- what cannot be had ---------------------------------------------------------------------------


def test_an_unknown_type_is_refused_before_a_model_is_read() -> None:
    wrong: Any = "int4"
    with pytest.raises(RequestError, match="'float32', 'float16', 'int8' or None"):
        es.load("no such model", cache_dtype=wrong)


def test_a_model_with_an_encoder_refuses_it() -> None:
    with pytest.raises(UnsupportedError, match="Leave cache_dtype out"):
        LanguageModel(ours(reference_t5(torch.float64)), cache_dtype="float16")


def test_rows_are_not_kept_in_two_ways() -> None:
    with pytest.raises(RequestError, match="cache_dtype='float16' and a quantised cache"):
        say(model_with("float16"), cache_implementation="quantized")
