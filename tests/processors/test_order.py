"""A configuration makes the processors that it makes in transformers, in the same order."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig as TheirConfig
from transformers import GenerationMixin

from everystep.config import merge_configs
from everystep.errors import RequestError
from everystep.processors.base import UserProcessor
from everystep.processors.length import (
    MinLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
from everystep.processors.order import CANONICAL, RANK, Facts, build
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from tests.processors.making import VOCABULARY, applied, rectangle, rows_of, same, some_scores

EOS, PROMPT, LENGTH = (7, 2), 4, 20
CHOICES: dict[str, list[Any]] = {
    "sequence_bias": [{(3,): 2.0, (1, 2): -1.5}, [[[4], -1.0]]],
    "encoder_repetition_penalty": [1.5],
    "repetition_penalty": [1.2, 0.8],
    "no_repeat_ngram_size": [1, 2, 3],
    "encoder_no_repeat_ngram_size": [2],
    "bad_words_ids": [[[5], [7], [1, 2]]],
    "min_length": [PROMPT + 2, 50],
    "min_new_tokens": [1, 30],
    "forced_bos_token_id": [3],
    "forced_eos_token_id": [7, [7, 2]],
    "remove_invalid_values": [True],
    "exponential_decay_length_penalty": [(2, 1.2)],
    "suppress_tokens": [[1, 11]],
    "begin_suppress_tokens": [[6]],
    "temperature": [0.5, 1e-3, 2.0],
    "top_k": [None, 0, 1, 10, 1000],
    "top_p": [0.3, 0.9],
    "min_p": [0.1],
    "top_h": [0.5],
    "typical_p": [0.7],
    "epsilon_cutoff": [0.01],
    "eta_cutoff": [0.01],
    "renormalize_logits": [True],
}


def their_processors(values: dict[str, Any], beams: int, encoder: Tensor, pads: list[int]) -> Any:
    config = TheirConfig()
    defaults = TheirConfig._get_default_generation_params()
    for name, value in {**defaults, **values, "num_beams": beams, "max_length": LENGTH}.items():
        setattr(config, name, value)
    config._eos_token_tensor = torch.tensor(EOS)
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    model._merge_criteria_processor_list = lambda ours, custom: ours
    mask = torch.ones(len(pads), PROMPT, dtype=torch.int64)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return GenerationMixin._get_logits_processor(
        model, config, PROMPT, encoder, None, [], "cpu", {"attention_mask": mask}
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_configuration_means_what_it_means_in_the_reference(seed: int) -> None:
    pick = random.Random(seed)
    values = {name: pick.choice(c) for name, c in CHOICES.items() if pick.random() < 0.35}
    values["do_sample"] = pick.random() < 0.7
    if not values["do_sample"]:
        values = {name: v for name, v in values.items() if RANK[UserProcessor] > _rank_of(name)}
    beams, pads = pick.choice([1, 3]), [0, 2, 1]
    width = pick.choice([PROMPT, PROMPT + 3, LENGTH - 1])
    prefixes, encoder = rectangle(3, width), torch.tensor(rectangle(1, 6))
    facts = Facts(EOS, PROMPT, LENGTH, tuple(encoder[0].tolist()), beams, VOCABULARY)
    processors = build(merge_configs({**values, "num_beams": beams}), facts)
    rows = rows_of(prefixes, processors, prompt=PROMPT, pads=pads)
    theirs = their_processors(values, beams, encoder, pads)
    scores = some_scores(3)
    assert same(applied(rows, scores), theirs(torch.tensor(prefixes), scores.clone()))


def _rank_of(name: str) -> int:
    late = {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"}
    return len(CANONICAL) if name in late | {"epsilon_cutoff", "eta_cutoff"} else 0


def built(user: tuple = (), eos: tuple[int, ...] = EOS, **values: Any) -> tuple:
    return build(merge_configs(values), Facts(eos, PROMPT, LENGTH, vocab_size=37, user=user))


def test_nothing_is_asked_nothing_is_made() -> None:
    assert built() == ()


def test_sampling_keeps_fifty_tokens_unless_told_otherwise() -> None:
    assert built(do_sample=True) == (TopKLogitsWarper(50),)
    assert built(do_sample=True, top_k=None) == ()


def test_beams_keep_a_token_beside_every_end() -> None:
    facts = Facts(eos=EOS, beams=3)
    (top_p,) = build(merge_configs({"do_sample": True, "top_k": 0, "top_p": 0.5}), facts)
    assert top_p == TopPLogitsWarper(0.5, min_tokens_to_keep=3)


def test_the_first_suppressed_place_is_after_a_forced_begin() -> None:
    values = merge_configs({"begin_suppress_tokens": [5], "forced_bos_token_id": 3})
    for length, after in ((1, 1), (2, 0)):
        suppress = SuppressTokensAtBeginLogitsProcessor((5,), None, after=after)
        assert suppress in build(values, Facts(prompt_length=length))


def test_a_users_processor_stands_before_those_for_sampling() -> None:
    def own(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    kinds = [type(p) for p in built((own,), do_sample=True, min_length=9, temperature=0.5)]
    assert kinds == [
        MinLengthLogitsProcessor,
        UserProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
    ]


def test_one_object_given_twice_runs_once() -> None:
    def own(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    assert len(built((own, own))) == 1


def test_a_given_processor_replaces_the_one_of_its_class() -> None:
    own = MinLengthLogitsProcessor(3, (1,))
    with pytest.warns(UserWarning, match="the given MinLengthLogitsProcessor replaces"):
        assert built((own,), min_length=9) == (own,)


def test_a_given_processor_for_sampling_stands_in_the_users_slot() -> None:
    own = TemperatureLogitsWarper(0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert built((own,), do_sample=True, temperature=0.5, top_k=0) == (UserProcessor(own), own)
    rows, scores = rows_of([[1]], (UserProcessor(own, takes_rows=True), own)), torch.ones(1, 5)
    assert applied(rows, scores).tolist() == [[4.0] * 5]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"sequence_bias": {(3, 99): 1.0}}, r"sequence_bias names ids beyond .* got \[99\]"),
        ({"bad_words_ids": [[40]]}, r"bad_words_ids names ids beyond .* wanted ids below 37"),
        ({"forced_bos_token_id": 37}, "forced_bos_token_id names ids beyond"),
        ({"forced_eos_token_id": [1, 37]}, "forced_eos_token_id names ids beyond"),
        ({"typical_p": 1.0, "do_sample": True, "temperature": 0.0}, "do_sample=False"),
    ],
)
def test_impossible_values_are_refused_before_anything_runs(values: dict, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        built(**values)


def test_a_growing_end_needs_an_end_token() -> None:
    with pytest.raises(RequestError, match="wanted eos_token_id"):
        built(eos=(), exponential_decay_length_penalty=(1, 1.1))


def test_a_forced_end_needs_a_last_place() -> None:
    with pytest.raises(RequestError, match="wanted a max_length"):
        build(merge_configs({"forced_eos_token_id": 2}), Facts())


def test_a_watermark_comes_last_but_for_normalisation() -> None:
    made = built(do_sample=True, renormalize_logits=True, watermarking_config={"bias": 1.0})
    assert [type(one).__name__ for one in made] == [
        *("TopKLogitsWarper", "WatermarkLogitsProcessor", "LogitNormalization"),
    ]


@pytest.mark.parametrize("name", ["encoder_repetition_penalty", "encoder_no_repeat_ngram_size"])
def test_what_needs_the_prompts_ids_says_so(name: str) -> None:
    with pytest.warns(UserWarning, match=f"{name} has no effect"):
        assert built(**{name: 2}) == ()
