"""The fields of samplers and penalties reach the scores, in the order that the caller gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.api.model import LanguageModel
from everystep.config import merge_configs
from everystep.config.kinds import SAMPLERS
from everystep.errors import RequestError
from everystep.processors.bias import LogitBias
from everystep.processors.order import CANONICAL, NAMES, Facts, build
from everystep.processors.order import SAMPLERS as MADE
from everystep.processors.repetition import Dry, OccurrencePenalty
from everystep.processors.samplers import DynamicTemperature, Mirostat, TopNSigma, Xtc
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

EVERY: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 2.0},
    "dry_multiplier": 0.8,
    "top_n_sigma": 3.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.01,
    "mirostat_tau": 4.0,
    "dynatemp_range": 0.5,
}
PROMPTS = torch.tensor([[5, 6, 7], [11, 12, 13], [20, 21, 22]])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama()


def built(facts: Facts | None = None, **values: Any) -> list[Any]:
    return list(build(merge_configs({"top_k": 0, **values}), facts or Facts()))


def test_every_field_makes_its_processor() -> None:
    assert built(do_sample=True, **EVERY) == [
        LogitBias(((5, 2.0),)),
        OccurrencePenalty(0.5, 0.5),
        Dry(0.8),
        DynamicTemperature(1.0, 0.5),
        TopNSigma(3.0),
        Xtc(0.5, 0.01),
        Mirostat(4.0),
    ]


def test_penalties_need_no_sampling() -> None:
    penalties = dict(list(EVERY.items())[:4])
    assert [type(one) for one in built(**penalties)] == [LogitBias, OccurrencePenalty, Dry]


def test_the_named_samplers_come_first_and_the_others_after_them() -> None:
    order = ["mirostat", "min_p", "temperature"]
    made = built(do_sample=True, min_p=0.1, top_p=0.9, sampler_order=order, **EVERY)
    names = [type(one).__name__ for one in made[3:]]
    assert names == [
        *("Mirostat", "MinPLogitsWarper", "DynamicTemperature"),
        *("TopNSigma", "TopPLogitsWarper", "Xtc"),
    ]


def test_every_sampler_has_a_name() -> None:
    assert tuple(dict.fromkeys(NAMES.values())) == SAMPLERS
    assert {*NAMES} == {*MADE, DynamicTemperature}
    assert all(field.startswith(NAMES[kind]) for kind, (_, field, *_) in MADE.items())
    assert [kind for kind in CANONICAL if kind in MADE] == list(MADE)


def test_beams_keep_a_token_beside_every_end() -> None:
    values = {"do_sample": True, "num_beams": 3, "xtc_probability": 0.5, "mirostat_tau": 2.0}
    xtc, mirostat = built(Facts(eos=(1, 2), beams=3), **values)
    assert (xtc.min_tokens_to_keep, mirostat.min_tokens_to_keep) == (3, 3)


def test_texts_that_break_repetitions_become_ids() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    values = {"dry_multiplier": 1.0, "dry_sequence_breakers": [":", 7]}
    (dry,) = built(Facts(encode=encode), **values)
    assert dry.breakers == (ord(":"), 7)
    with pytest.raises(RequestError, match=r"dry_sequence_breakers .* needs a tokenizer"):
        built(**values)


def test_generate_encodes_the_texts(model: LanguageModel) -> None:
    breakers = {"dry_multiplier": 1.0, "dry_sequence_breakers": ["\n"], "max_new_tokens": 3}
    model.generate(PROMPTS, tokenizer=tiny_tokenizer(), **breakers)
    with pytest.raises(RequestError, match="Pass tokenizer=tokenizer"):
        model.generate(PROMPTS, **breakers)


def test_a_bias_beyond_the_vocabulary_is_refused_before_any_compute(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="logit_bias names ids beyond the vocabulary"):
        model.generate(PROMPTS, logit_bias={10**6: 1.0})


@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3}])
def test_a_seeded_row_is_the_same_alone(model: LanguageModel, options: dict[str, Any]) -> None:
    values = {"do_sample": True, "max_new_tokens": 8, **EVERY, **options}
    batch = model.generate(PROMPTS, seed=[1, 2, 3], **values)
    for row in range(3):
        alone = model.generate(PROMPTS[row : row + 1], seed=row + 1, **values)[0]
        assert batch[row, : len(alone)].tolist() == alone.tolist()


def test_without_a_seed_the_global_generator_decides(model: LanguageModel) -> None:
    values = {"do_sample": True, "max_new_tokens": 12, **EVERY}
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model.generate(PROMPTS, **values).tolist())
    assert runs[0] == runs[1] != runs[2]


STRONG: list[dict[str, Any]] = [
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"logit_bias": {5: 20.0}},
    {"top_n_sigma": 0.5},
    {"xtc_probability": 0.9, "xtc_threshold": 0.01},
    {"mirostat_tau": 0.5},
    {"dynatemp_range": 0.9},
]


@pytest.mark.parametrize("values", STRONG, ids=lambda values: next(iter(values)))
def test_each_field_changes_what_is_drawn(model: LanguageModel, values: dict[str, Any]) -> None:
    base: dict[str, Any] = {"do_sample": True, "seed": 5, "max_new_tokens": 24}
    changed = model.generate(PROMPTS, **base, **values)
    assert changed.tolist() != model.generate(PROMPTS, **base).tolist()
