"""Who wins where several say something, and what is said about values that do not go together."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest

from everystep.config import FIELDS, META, GenerationConfig, merge_configs
from everystep.config.rules import RULES
from everystep.errors import RequestError, UnknownArgumentError
from tests.config.values import DEFAULTS
from tests.reading import ROOT

CHECKPOINT = GenerationConfig.from_checkpoint({"top_p": 0.1, "temperature": 0.6, "top_k": 20})


# --- precedence -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "passed", "checkpoint", "value", "source"),
    [
        ({"top_k": 1}, {"top_k": 2}, {"top_k": 3}, 1, "call"),
        ({}, {"top_k": 2}, {"top_k": 3}, 2, "config"),
        ({}, {}, {"top_k": 3}, 3, "checkpoint"),
        ({}, {}, {}, 50, "default"),
        ({}, {"top_k": None}, {"top_k": 3}, 3, "checkpoint"),
        ({"top_k": None}, {"top_k": 2}, {"top_k": 3}, None, "call"),
        ({"top_k": 0}, {}, {"top_k": 3}, 0, "call"),
    ],
)
def test_the_nearest_wins(
    call: dict, passed: dict, checkpoint: dict, value: Any, source: str
) -> None:
    effective = merge_configs(
        {"do_sample": True, **call},
        GenerationConfig(**passed),
        GenerationConfig.from_checkpoint(checkpoint),
    )
    assert (effective.top_k, effective.source("top_k")) == (value, source)


def test_without_values_the_defaults_hold() -> None:
    effective = merge_configs({})
    assert {n: v for n, v in effective.items() if v is not None} == DEFAULTS
    assert set(effective.sources.values()) == {"default"}
    assert set(effective) == set(FIELDS) - META


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", None),
        ("max_length", None),
        ("temperature", 1.0),
        ("num_beams", 1),
        ("min_p", None),
    ],
)
def test_none_in_the_call_turns_off(name: str, value: Any) -> None:
    passed = GenerationConfig(**{name: 3 if name != "min_p" else 0.5}, do_sample=True)
    assert merge_configs({name: None}, passed)[name] == value


def test_an_unknown_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownArgumentError, match=r"'max_token'. The nearest is max_new_tokens"):
        merge_configs({"max_token": 5})


def test_a_wrong_value_in_the_call_is_refused() -> None:
    with pytest.raises(RequestError, match="top_p is not valid"):
        merge_configs({"top_p": 5})


def test_it_can_be_read_by_attribute_and_key_and_be_copied() -> None:
    effective = copy.deepcopy(merge_configs({"top_k": 5, "do_sample": True}))
    assert effective.top_k == effective["top_k"] == 5
    with pytest.raises(AttributeError):
        effective.topk  # noqa: B018


def test_later_values_keep_their_source() -> None:
    effective = merge_configs({"max_new_tokens": 5}).replaced("call", max_length=9)
    assert (effective.max_length, effective.source("max_length")) == (9, "call")
    with pytest.raises(UnknownArgumentError):
        effective.replaced("call", max_len=9)


def test_its_text_shows_what_was_set() -> None:
    effective = merge_configs({"top_k": 5}, GenerationConfig(do_sample=True))
    text = "Effective(do_sample=True (config), top_k=5 (call); everything else by default)"
    assert repr(effective) == text


def test_merging_changes_no_argument() -> None:
    passed = GenerationConfig(eos_token_id=[1])
    merge_configs({}, passed).eos_token_id.append(2)
    assert passed.eos_token_id == [1]


def test_what_the_call_takes_back_contradicts_nothing() -> None:
    passed = GenerationConfig(do_sample=True, top_p=0.5)
    (notice,) = merge_configs({"do_sample": None}, passed).notices
    assert notice.startswith("top_p has no effect")


# --- what does not go together --------------------------------------------------------------------

# The caller sets both: an error that names both.
CONFLICTS: list[dict[str, Any]] = [
    *[{name: 0.5, "do_sample": False} for name in
      ("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")],
    {"top_k": 5, "do_sample": False},
    *[{name: 0.5, "do_sample": False} for name in
      ("top_n_sigma", "xtc_probability", "mirostat_tau", "dynatemp_range")],
    {"sampler_order": ["top_p"], "do_sample": False},
    {"early_stopping": True, "num_beams": 1},
    {"length_penalty": 2.0, "num_beams": 1},
    {"diversity_penalty": 0.5, "num_beam_groups": 1},
    {"penalty_alpha": 0.6, "num_beams": 2},
    {"dola_layers": "low", "num_beams": 2},
    {"prompt_lookup_num_tokens": 3, "num_beams": 2},
    {"assistant_early_exit": 3, "num_beams": 2},
    {"use_mtp": True, "num_beams": 2},
    {"penalty_alpha": 0.6, "do_sample": True},
    {"cache_implementation": "static", "use_cache": False},
    {"cache_config": {"nbits": 4}, "use_cache": False},
    {"max_cache_len": 9, "use_cache": False},
    {"prefill_chunk_size": 2, "use_cache": False},
    {"min_new_tokens": 9, "max_new_tokens": 4},
    {"output_scores": True, "return_dict_in_generate": False},
    {"output_logits": True, "return_dict_in_generate": False},
    {"output_attentions": True, "return_dict_in_generate": False},
    {"output_hidden_states": True, "return_dict_in_generate": False},
]  # fmt: skip
# An error whoever sets what.
IMPOSSIBLE: list[dict[str, Any]] = [
    {"temperature": 0.0, "do_sample": True},
    {"dynatemp_range": 0.5, "temperature": 0.5, "do_sample": True},
    {"dynatemp_range": 0.5, "temperature": [0.5, 2.0], "do_sample": True},
    {"temperature": [1.0, 0.0], "do_sample": True},
    {"penalty_alpha": 0.6, "top_k": [4, 5]},
    {"dola_layers": "low", "penalty_alpha": 0.6, "top_k": 4},
    {"num_return_sequences": 2, "do_sample": False},
    {"num_return_sequences": 3, "num_beams": 2},
    {"num_beam_groups": 2, "num_beams": 3, "diversity_penalty": 1.0},
    {"num_beam_groups": 2, "do_sample": True, "num_beams": 4, "diversity_penalty": 1.0},
    {"diversity_penalty": 0.0, "num_beam_groups": 2, "num_beams": 4},
    {"force_words_ids": [[1]], "do_sample": True, "num_beams": 2},
    {"force_words_ids": [[1]], "num_beams": 1},
    {"force_words_ids": [[1]], "num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 1.0},
    {"constraints": [object()], "num_beams": 1},
    {"constraints": [object()], "do_sample": True, "num_beams": 2},
    {"constraints": [1], "num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 1.0},
    {"suppress_tokens": [1, 2], "forced_eos_token_id": [1, 2]},
    {"suppress_tokens": [1, 2], "forced_bos_token_id": 1},
    {"assistant_ensemble_weight": 0.5, "prompt_lookup_num_tokens": 3},
]
# The caller sets the first: a notice that names it.
NOTICES: list[dict[str, Any]] = [
    *[{name: value} for conflict in CONFLICTS for name, value in [next(iter(conflict.items()))]
      if name not in ("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens",
                      "assistant_early_exit", "use_mtp", "cache_implementation", "cache_config",
                      "prefill_chunk_size", "min_new_tokens")],
    {"max_length": 9, "max_new_tokens": 4},
    {"eos_token_id": -1},
    {"min_new_tokens": 3, "min_length": 9},
    {"pad_token_id": -1},
    {"cache_config": {"nbits": 4}},
    *[{"prefill_chunk_size": 2, name: True, "return_dict_in_generate": True}
      for name in ("output_hidden_states", "output_attentions")],
    *[{name: value} for name, value in
      {"dry_base": 1.5, "dry_allowed_length": 3, "dry_sequence_breakers": [7],
       "xtc_threshold": 0.2, "mirostat_eta": 0.2, "dynatemp_exponent": 2.0,
       "penalty_scope": "new"}.items()],
]  # fmt: skip
FINE: list[dict[str, Any]] = [
    {"temperature": 1.0, "do_sample": False, "top_k": 50, "early_stopping": False},
    {"temperature": 0.5, "do_sample": True, "top_k": 1},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"num_return_sequences": 3, "do_sample": True},
    {"num_return_sequences": 3, "num_beams": 3, "early_stopping": "never", "length_penalty": 0.0},
    {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5},
    {"force_words_ids": [[1]], "num_beams": 2},
    {"suppress_tokens": [1], "forced_eos_token_id": [1, 2]},
    {"max_cache_len": 9, "cache_implementation": "static"},
    {"output_scores": True, "return_dict_in_generate": True},
    {"penalty_scope": "new", "repetition_penalty": 1.2},
    {"penalty_scope": "all", "frequency_penalty": 0.2},
]


@pytest.mark.parametrize("values", [*CONFLICTS, *IMPOSSIBLE])
def test_contradictions_of_the_caller_are_errors(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        merge_configs(values)
    assert sum(f"{name}=" in str(caught.value) for name in values) >= 2
    assert str(caught.value).count(". ") >= 1  # it says what to do


@pytest.mark.parametrize("values", CONFLICTS)
def test_call_and_passed_configuration_are_both_the_caller(values: dict[str, Any]) -> None:
    loses, *others = values
    with pytest.raises(RequestError, match=f"{loses} (has no effect|cannot be reached)"):
        merge_configs({n: values[n] for n in others}, GenerationConfig(**{loses: values[loses]}))


@pytest.mark.parametrize("values", CONFLICTS)
def test_values_of_a_checkpoint_cause_no_notices(values: dict[str, Any]) -> None:
    loses, *others = values
    inherited = GenerationConfig.from_checkpoint({loses: values[loses]})
    call = {name: values[name] for name in others}
    assert merge_configs(call, None, inherited).notices == ()
    assert merge_configs(call, inherited).notices == ()


@pytest.mark.parametrize("values", [*CONFLICTS, *NOTICES])
def test_a_checkpoint_contradicts_itself_without_a_word(values: dict[str, Any]) -> None:
    assert merge_configs({}, None, GenerationConfig.from_checkpoint(values)).notices == ()


@pytest.mark.parametrize("values", NOTICES)
def test_a_value_without_effect_is_a_notice(values: dict[str, Any]) -> None:
    (notice,) = merge_configs(values).notices
    assert f"{next(iter(values))}=" in notice


@pytest.mark.parametrize("values", FINE)
def test_what_goes_together_is_not_mentioned(values: dict[str, Any]) -> None:
    assert merge_configs(values).notices == ()


@pytest.mark.parametrize("values", IMPOSSIBLE)
def test_impossible_values_are_errors_from_every_source(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        merge_configs({}, None, GenerationConfig.from_checkpoint(values))
    with pytest.raises(RequestError):
        GenerationConfig(**values)


def test_every_rule_is_tried() -> None:
    tried = [*CONFLICTS, *IMPOSSIBLE, *NOTICES]
    filled = [merge_configs({}).values_by_name | values for values in tried]
    untried = [r for r in RULES if not any(r.clash(values) for values in filled)]
    assert [(rule.decides, rule.loses) for rule in untried] == []


def test_the_guide_lists_every_rule_and_no_other() -> None:
    guide = (ROOT / "docs" / "guide" / "configuration.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\w+) \| (.*) \|$", guide, re.M)
    assert listed == [(rule.loses, rule.decides, rule.level, rule.what) for rule in RULES]


def test_a_loaded_value_that_is_set_again_is_the_callers() -> None:
    config = GenerationConfig.from_checkpoint({"top_p": 0.5})
    config.top_p = 0.5
    with pytest.raises(RequestError, match="top_p has no effect"):
        merge_configs({"do_sample": False}, config)


def test_validate_warns_or_raises() -> None:
    config = GenerationConfig(top_p=0.5)
    with pytest.warns(UserWarning, match="top_p has no effect"):
        config.validate()
    with pytest.raises(RequestError, match="top_p has no effect"):
        config.validate(strict=True)


def test_what_was_loaded_is_valid_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GenerationConfig.from_checkpoint({"top_p": 0.5, "pad_token_id": -1}).validate(strict=True)
