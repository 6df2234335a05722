"""A configuration checks names and values when they are set, and changes whole or not."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig as Theirs

from everystep.config import FIELDS, GenerationConfig
from everystep.config.fields import GenerationMode, generation_mode
from everystep.errors import (
    RequestError,
    UnknownArgumentError,
)
from tests.config.values import DEFAULTS, OURS, VALUES

# --- fields and defaults --------------------------------------------------------------------------


def test_the_fields_are_the_references() -> None:
    assert set(FIELDS) - OURS == set(Theirs().__dict__)


def test_every_field_starts_unset() -> None:
    assert all(value is None for value in GenerationConfig().to_dict().values())


def test_the_defaults_are_the_references() -> None:
    theirs = Theirs._get_default_generation_params()
    ours = {name: value for name, value in DEFAULTS.items() if name not in OURS}
    assert {name: value for name, value in theirs.items() if value is not None} == ours


def test_every_default_could_be_set() -> None:
    for name, value in DEFAULTS.items():
        assert getattr(GenerationConfig(**{name: value}), name) == value


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("repetition_penality", "repetition_penalty"),
        ("num_beam", "num_beams"),
    ],
)
def test_a_mistyped_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownArgumentError, match=rf"'{name}'. The nearest is {nearest}\."):
        GenerationConfig(**{name: 1})


def test_a_name_of_another_library_is_answered_with_ours() -> None:
    with pytest.raises(UnknownArgumentError, match="Perhaps you meant max_new_tokens"):
        GenerationConfig(max_tokens=1)  # type: ignore[call-arg]


def test_a_mistyped_attribute_is_refused() -> None:
    with pytest.raises(UnknownArgumentError, match="The nearest is top_p"):
        GenerationConfig().top_pp = 0.5


def test_arguments_of_the_call_are_sent_there() -> None:
    with pytest.raises(UnknownArgumentError, match=r"Pass streamer to generate\(\) itself"):
        GenerationConfig(streamer=None)


def test_an_unknown_attribute_cannot_be_read() -> None:
    with pytest.raises(AttributeError, match="no field 'topp'"):
        GenerationConfig().topp  # noqa: B018


# --- values ---------------------------------------------------------------------------------------

WRONG: list[tuple[str, Any, str]] = [
    ("max_length", 0, "an integer from 1 to"),
    ("max_new_tokens", -1, "an integer from 1 to"),
    ("max_new_tokens", 2.5, "an integer from 1 to"),
    ("max_new_tokens", True, "an integer from 1 to"),
    ("min_length", -1, "an integer of at least 0"),
    ("early_stopping", "always", "one of True, False, 'never'"),
    ("early_stopping", 1, "one of True, False, 'never'"),
    ("max_time", -1, "a number of at least 0"),
    ("stop_strings", "", "none of them empty"),
    ("stop_strings", ["a", ""], "none of them empty"),
    ("stop_strings", [1], "a string or a list of strings"),
    ("do_sample", "yes", "True or False"),
    ("do_sample", 1, "True or False"),
    ("num_beams", 0, "an integer from 1 to"),
    ("num_beams", "4", "an integer from 1 to"),
    ("temperature", -0.5, "a number of at least 0"),
    ("temperature", float("nan"), "a number of at least 0"),
    ("temperature", "hot", "a number of at least 0"),
    ("top_k", -1, "an integer of at least 0"),
    ("top_k", 0.5, "an integer of at least 0"),
    ("top_p", 1.1, "a number from 0 to 1"),
    ("min_p", -0.1, "a number from 0 to 1"),
    ("top_h", 0, "a number above 0, at most 1"),
    ("typical_p", 0.0, "a number above 0, at most 1"),
    ("epsilon_cutoff", 1.0, "a number from 0 to below 1"),
    ("eta_cutoff", -1, "a number from 0 to below 1"),
    ("repetition_penalty", 0, "a number above 0"),
    ("presence_penalty", 2.5, "a number from -2 to 2"),
    ("frequency_penalty", "0.5", "a number from -2 to 2"),
    ("logit_bias", {}, "a non-empty dict"),
    ("logit_bias", {-1: 1.0}, "a non-empty dict"),
    ("logit_bias", {"a": 1.0}, "a non-empty dict"),
    ("logit_bias", {1: float("inf")}, "finite number"),
    ("logit_bias", {1: 1.0, "1": 2.0}, "a non-empty dict"),
    ("dry_multiplier", -0.5, "a number of at least 0"),
    ("dry_base", 0.9, "a number of at least 1"),
    ("dry_allowed_length", 0, "an integer of at least 1"),
    ("dry_sequence_breakers", [""], "non-empty strings and token ids"),
    ("dry_sequence_breakers", "\n", "a list"),
    ("top_n_sigma", 0, "a number above 0"),
    ("xtc_probability", 1.5, "a number from 0 to 1"),
    ("xtc_threshold", -1, "a number from 0 to 1"),
    ("mirostat_tau", 0, "a number above 0"),
    ("mirostat_eta", 2, "a number from 0 to 1"),
    ("dynatemp_range", -1, "a number of at least 0"),
    ("dynatemp_exponent", 0, "a number above 0"),
    ("sampler_order", [], "a list of different names among temperature"),
    ("sampler_order", ["top_p", "top_p"], "a list of different names"),
    ("sampler_order", ["topp"], "a list of different names"),
    ("no_repeat_ngram_size", -2, "an integer of at least 0"),
    ("bad_words_ids", [], "a non-empty list of non-empty lists"),
    ("bad_words_ids", [1, 2], "a non-empty list of non-empty lists"),
    ("bad_words_ids", [[]], "a non-empty list of non-empty lists"),
    ("bad_words_ids", [[-1]], "a non-empty list of non-empty lists"),
    ("forced_eos_token_id", "end", "a token id or a list of token ids"),
    ("exponential_decay_length_penalty", (1,), "a pair"),
    ("exponential_decay_length_penalty", (1, 0.0), "a pair"),
    ("suppress_tokens", 5, "a list of token ids"),
    ("sequence_bias", {}, "a non-empty dict"),
    ("sequence_bias", {1: 2.0}, "a non-empty dict"),
    ("sequence_bias", {(): 2.0}, "a non-empty dict"),
    ("sequence_bias", {(1,): "much"}, "a non-empty dict"),
    ("sequence_bias", [[1, 2.0]], "a non-empty dict"),
    ("eos_token_id", [1.5], "a token id or a list of token ids"),
    ("cache_implementation", "fast", "one of 'dynamic'"),
    ("cache_config", [1], "a dict with strings as keys"),
    ("num_assistant_tokens_schedule", "linear", "one of 'constant'"),
    ("assistant_ensemble_weight", 1.0, "a number between 0 and 1"),
    ("dola_layers", "middle", "'low', 'high' or a list"),
    ("compile_config", "fast", "a CompileConfig or a dict"),
    ("watermarking_config", 3, "a WatermarkingConfig"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(RequestError) as caught:
        GenerationConfig(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name} is not valid; wanted ")
    assert wanted in text
    assert f"got {value!r}" in text


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_refuses_an_object_of_another_kind(name: str) -> None:
    with pytest.raises(RequestError, match=f"{name} is not valid"):
        GenerationConfig(**{name: object()})


def test_greedy_is_what_a_temperature_of_less_than_nothing_means() -> None:
    with pytest.raises(RequestError, match="For greedy decoding set do_sample=False"):
        GenerationConfig(temperature=-1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"greenlist_ratio": 2}, r"greenlist_ratio is not valid; wanted a number from 0 to 1"),
        ({"seeding_scheme": "x"}, "wanted 'lefthash' or 'selfhash'; got 'x'"),
        ({"context_width": 0}, "wanted an integer of at least 1"),
        ({"biass": 1}, "has no value 'biass'. The nearest is bias"),
        ({"ngram_len": 5}, "is incomplete; wanted ngram_len and keys; got ngram_len"),
        ({"ngram_len": 5, "keys": []}, "wanted a non-empty list of integers"),
        ({"ngram_len": 5, "keys": [1], "sampling_table_size": 2**25}, "from 1 to"),
    ],
)
def test_a_wrong_watermark_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        GenerationConfig(watermarking_config=values)


def test_whole_numbers_pass_where_numbers_do() -> None:
    config = GenerationConfig(temperature=2, sequence_bias={(1,): 3})
    assert (config.temperature, config.sequence_bias) == (2, {(1,): 3.0})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", -2),
        ("presence_penalty", 2),
        ("frequency_penalty", -1.5),
        ("exponential_decay_length_penalty", (0, 0.5)),
        ("exponential_decay_length_penalty", (5, 1)),
        ("suppress_tokens", [0, (1 << 63) - 1]),
    ],
)
def test_a_range_has_its_ends(name: str, value: Any) -> None:
    assert getattr(GenerationConfig(**{name: value}), name) == value


def test_tensors_and_arrays_are_kept_as_plain_values() -> None:
    config = GenerationConfig(eos_token_id=torch.tensor([1, 2]), top_k=np.int64(5))
    assert (config.eos_token_id, config.top_k) == ([1, 2], 5)
    assert type(config.top_k) is int


def test_both_spellings_of_biases_mean_the_same() -> None:
    pairs, table = [[[1, 2], 1.0], [[3], -1.0]], {(1, 2): 1.0, (3,): -1.0}
    assert GenerationConfig(sequence_bias=pairs) == GenerationConfig(sequence_bias=table)


# --- changing -------------------------------------------------------------------------------------


def test_update_returns_what_it_did_not_use() -> None:
    config = GenerationConfig(top_k=5)
    assert config.update(top_k=7, other=1) == {"other": 1}
    assert config.top_k == 7


def test_update_may_keep_what_was_set() -> None:
    config = GenerationConfig(top_k=5)
    assert config.update(defaults_only=True, top_k=7, top_p=0.5) == {"top_k": 7}
    assert (config.top_k, config.top_p) == (5, 0.5)


def test_update_may_keep_names_that_no_field_has() -> None:
    config = GenerationConfig()
    assert config.update(allow_custom_entries=True, lang_to_id={"en": 3}) == {}
    assert config.lang_to_id == {"en": 3}


def test_a_refused_update_changes_nothing() -> None:
    config = GenerationConfig(top_k=5)
    with pytest.raises(RequestError):
        config.update(top_k=7, top_p=9)
    with pytest.raises(RequestError):
        config.update(top_k=7, num_return_sequences=3)
    assert config == GenerationConfig(top_k=5)


def test_equality_compares_what_was_set() -> None:
    assert GenerationConfig(top_k=5) == GenerationConfig(top_k=5)
    assert GenerationConfig(top_k=5) != GenerationConfig(top_k=6)
    assert GenerationConfig(top_k=5) != GenerationConfig()
    assert GenerationConfig(top_k=5) != {"top_k": 5}
    first, second = (GenerationConfig.from_checkpoint(VALUES) for _ in range(2))
    assert hash(first) == hash(second)


def test_who_wrote_it_makes_no_difference() -> None:
    assert GenerationConfig(transformers_version="5.0") == GenerationConfig()


def test_its_text_shows_what_was_set() -> None:
    assert repr(GenerationConfig(top_k=5, top_p=0.5)) == "GenerationConfig(top_k=5, top_p=0.5)"


def test_a_copy_is_independent() -> None:
    config = GenerationConfig(eos_token_id=[1])
    twin = copy.deepcopy(config)
    twin.eos_token_id.append(2)
    config.to_dict()["eos_token_id"].append(3)
    assert config.eos_token_id == [1]


# --- modes ----------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True},
    {"num_beams": 3},
    {"num_beams": 3, "do_sample": True},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 3, "force_words_ids": [[1]]},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"penalty_alpha": 0.6, "top_k": 1},
    {"penalty_alpha": 0.6, "top_k": 2},
    {"penalty_alpha": 0.6, "top_k": 4, "do_sample": True},
    {"prompt_lookup_num_tokens": 3},
    {"prompt_lookup_num_tokens": 3, "do_sample": True},
    {"assistant_early_exit": 2},
    {"use_mtp": True},
    {"dola_layers": "low"},
    {"dola_layers": "low", "prompt_lookup_num_tokens": 3},
    {"num_beams": 3, "prompt_lookup_num_tokens": 3},
]


@pytest.mark.parametrize("assistant", [None, object()])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_the_mode_is_the_references(settings: dict[str, Any], assistant: object) -> None:
    theirs = Theirs(**settings).get_generation_mode(assistant)
    ours = GenerationConfig(**settings).get_generation_mode(assistant)
    assert str(ours) == theirs.value


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({}, GenerationMode.GREEDY_SEARCH),
        ({"do_sample": True}, GenerationMode.SAMPLE),
        ({"penalty_alpha": 0.6, "top_k": 4}, GenerationMode.CONTRASTIVE_SEARCH),
    ],
)
def test_no_number_of_beams_is_one_beam(settings: dict[str, Any], mode: GenerationMode) -> None:
    values = {**dict.fromkeys(FIELDS), **settings}
    assert values["num_beams"] is None
    assert generation_mode(values) is mode
