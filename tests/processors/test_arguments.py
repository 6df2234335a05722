"""Arguments of processors: what is refused is what transformers refuses, and values per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep
from everystep.errors import RequestError, UnsupportedError
from everystep.processors.base import LogitsProcessor
from everystep.processors.order import Facts
from tests.processors.making import rectangle, same, some_scores
from tests.processors.test_order import EOS, PROMPT, build, merge_configs

ENCODER = torch.tensor([[1, 2]])
WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("TemperatureLogitsWarper", (0.0,), "temperature .* do_sample=False"),
    ("TemperatureLogitsWarper", (-1.0,), "temperature .* wanted a number above 0"),
    ("TemperatureLogitsWarper", ("hot",), "temperature .* got 'hot'"),
    ("TopKLogitsWarper", (0,), "top_k .* at least 1"),
    ("TopKLogitsWarper", (2.5,), "top_k .* got 2.5"),
    ("TopPLogitsWarper", (1.1,), "top_p .* from 0 to 1"),
    ("TopPLogitsWarper", (-0.1,), "top_p .* from 0 to 1"),
    ("TopPLogitsWarper", (0.5, -1.0, 0), "min_tokens_to_keep .* at least 1"),
    ("TopHLogitsWarper", (0.0,), "top_h .* above 0"),
    ("TopHLogitsWarper", (1.5,), "top_h .* at most 1"),
    ("MinPLogitsWarper", (1.5,), "min_p .* from 0 to 1"),
    ("MinPLogitsWarper", (0.5, -1.0, 0.5), "min_tokens_to_keep"),
    ("TypicalLogitsWarper", (1.0,), "typical_p .* both excluded"),
    ("TypicalLogitsWarper", (0.5, -1.0, 0), "min_tokens_to_keep"),
    ("EpsilonLogitsWarper", (0.0,), "epsilon_cutoff .* both excluded"),
    ("EpsilonLogitsWarper", (0.5, -1.0, 0), "min_tokens_to_keep"),
    ("EtaLogitsWarper", (1.0,), "eta_cutoff .* both excluded"),
    ("EtaLogitsWarper", (0.5, -1.0, 0), "min_tokens_to_keep"),
    ("RepetitionPenaltyLogitsProcessor", (0.0,), "repetition_penalty .* above 0"),
    ("RepetitionPenaltyLogitsProcessor", (1.5, -1), "prompt_ignore_length .* at least 0"),
    ("RepetitionPenaltyLogitsProcessor", (1.5, torch.zeros(2, 2)), "prompt_ignore_length"),
    ("EncoderRepetitionPenaltyLogitsProcessor", (-1.0, ENCODER), "encoder_repetition_penalty"),
    ("NoRepeatNGramLogitsProcessor", (0,), "no_repeat_ngram_size .* at least 1"),
    ("NoRepeatNGramLogitsProcessor", (1.5,), "no_repeat_ngram_size"),
    ("EncoderNoRepeatNGramLogitsProcessor", (0, ENCODER), "encoder_no_repeat_ngram_size"),
    ("SequenceBiasLogitsProcessor", ({},), "sequence_bias .* non-empty"),
    ("SequenceBiasLogitsProcessor", ({1: 2.0},), "sequence_bias"),
    ("SequenceBiasLogitsProcessor", ({(): 2.0},), "sequence_bias"),
    ("SequenceBiasLogitsProcessor", ({(-1,): 2.0},), "sequence_bias"),
    ("SequenceBiasLogitsProcessor", ({(1,): "much"},), "sequence_bias"),
    ("SequenceBiasLogitsProcessor", ([[[1], "much"]],), "sequence_bias"),
    ("NoBadWordsLogitsProcessor", ([],), "bad_words_ids .* non-empty"),
    ("NoBadWordsLogitsProcessor", ([3],), "bad_words_ids"),
    ("NoBadWordsLogitsProcessor", ([[-3]],), "bad_words_ids"),
    ("MinLengthLogitsProcessor", (-1, 2), "min_length .* at least 0"),
    ("MinLengthLogitsProcessor", (1.5, 2), "min_length"),
    ("MinNewTokensLengthLogitsProcessor", (-1, 1, 2), "prompt_length_to_skip .* at least 0"),
    ("MinNewTokensLengthLogitsProcessor", (1, -1, 2), "min_new_tokens .* at least 0"),
    ("ForcedEOSTokenLogitsProcessor", (9, -1), "forced_eos_token_id .* from 0 on"),
    ("ForcedEOSTokenLogitsProcessor", (9, torch.tensor([1.5])), "forced_eos_token_id"),
    ("ExponentialDecayLengthPenalty", ((1, 1.1), -1, 3), "eos_token_id .* from 0 on"),
    ("ExponentialDecayLengthPenalty", ((1, 1.1), torch.tensor([1.5]), 3), "eos_token_id"),
    ("AlternatingCodebooksLogitsProcessor", (-1, 3, 3), "input_start_len .* at least 0"),
    ("BarkEosPrioritizerLogitsProcessor", (2, 0.0), "min_eos_p .* above 0"),
    ("BarkEosPrioritizerLogitsProcessor", (-2, 0.5), "eos_token_id"),
    ("ClassifierFreeGuidanceLogitsProcessor", (1.0,), "guidance_scale .* above 1"),
    ("DiaClassifierFreeGuidanceLogitsProcessor", (0.5,), "guidance_scale .* above 1"),
    ("DiaClassifierFreeGuidanceLogitsProcessor", (2.0, 0), "guidance_top_k .* at least 1"),
    ("DiaEOSChannelFilterLogitsProcessor", (0, 3), "num_channels .* at least 1"),
    ("DiaEOSChannelFilterLogitsProcessor", (3, 0), "eos_token_id .* at least 1"),
    ("WhisperTimeStampLogitsProcessor", (None, None), "begin_index .* an integer"),
]


@pytest.mark.parametrize(("name", "args", "text"), WRONG)
def test_both_refuse(name: str, args: tuple[Any, ...], text: str) -> None:
    with pytest.raises((ValueError, AttributeError)):
        getattr(reference, name)(*args)
    with pytest.raises(RequestError, match=text):
        getattr(everystep, name)(*args)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((0.0, 4, 2), "diversity_penalty .* above 0"),
        ((1.0, 1, 2), "num_beams .* at least 2"),
        ((1.0, 4, 1), "num_beam_groups .* at least 2"),
        ((1.0, 2, 4), "num_beam_groups .* at most num_beams=2"),
    ],
)
def test_diversity_refuses(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        everystep.HammingDiversityLogitsProcessor(*args)


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (everystep.SequenceBiasLogitsProcessor({(3, 99): 1.0}), r"beyond .* below 37; got \[99\]"),
        (everystep.NoBadWordsLogitsProcessor([[99]]), "bad_words_ids names ids beyond"),
        (everystep.PrefixConstrainedLogitsProcessor(lambda *_: [], 1), "allows nothing"),
        (everystep.PrefixConstrainedLogitsProcessor(lambda *_: [3, 37], 1), "0 to 36; got 37"),
        (everystep.PrefixConstrainedLogitsProcessor(lambda *_: [3, -1], 1), "0 to 36; got -1"),
        (everystep.ClassifierFreeGuidanceLogitsProcessor(2.0), "wanted 4 rows of scores for 2"),
        (everystep.RepetitionPenaltyLogitsProcessor(1.5, [1, 2, 3]), "one number, or 2 of them"),
    ],
)
def test_wrong_scores_and_rows_are_refused(ours: LogitsProcessor, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        ours(torch.zeros(2, 3).long(), some_scores(2))


@pytest.mark.parametrize(
    "ours",
    [
        everystep.EncoderRepetitionPenaltyLogitsProcessor(1.5, [[1, 2]]),
        everystep.SequenceBiasLogitsProcessor({(3, 4): 1.0, (5,): 2.0}),
        everystep.EncoderNoRepeatNGramLogitsProcessor(2, [[1, 2, 1]]),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_a_processor_finds_is_no_part_of_its_text(ours: LogitsProcessor) -> None:
    text = repr(ours)
    ours(torch.tensor(rectangle(2, 5)), some_scores(2))
    assert repr(ours) == text


def test_a_processor_that_says_nothing_cannot_be_called() -> None:
    class Mine(LogitsProcessor):
        pass

    with pytest.raises(NotImplementedError, match=r"Mine .* __call__\(input_ids, scores\)"):
        Mine()(torch.zeros(1, 1).long(), some_scores(1))
    with pytest.raises(UnsupportedError):
        LogitsProcessor()(torch.zeros(1, 1).long(), some_scores(1))


PER_ROW: list[tuple[str, list[Any]]] = [
    ("TemperatureLogitsWarper", [0.5, 1.0, 2.5]),
    ("TopKLogitsWarper", [1, 5, 99]),
    ("TopPLogitsWarper", [0.1, 0.5, 1.0]),
    ("TopHLogitsWarper", [0.1, 0.5, 1.0]),
    ("MinPLogitsWarper", [0.0, 0.1, 0.5]),
    ("TypicalLogitsWarper", [0.1, 0.5, 0.9]),
    ("EpsilonLogitsWarper", [0.1, 0.01, 0.3]),
    ("EtaLogitsWarper", [0.1, 0.01, 0.3]),
    ("RepetitionPenaltyLogitsProcessor", [0.5, 1.1, 3.0]),
]


@pytest.mark.parametrize("form", [list, tuple, torch.tensor, np.array])
@pytest.mark.parametrize(("name", "values"), PER_ROW)
def test_a_value_for_each_row(name: str, values: list[Any], form: Any) -> None:
    kind = getattr(everystep, name)
    ids, scores = torch.tensor(rectangle(3, 6)), some_scores(3).double()
    # A tensor of float32 holds other numbers than the list.
    values = values if form in (list, tuple) else form(values).tolist()
    alone = [kind(v)(ids[r : r + 1], scores[r : r + 1]) for r, v in enumerate(values)]
    assert same(kind(form(values))(ids, scores), torch.cat(alone))
    with pytest.raises(RequestError, match=r"does not fit the rows; wanted one number, or 2"):
        kind(form(values))(ids[:2], scores[:2])


def test_each_value_is_checked() -> None:
    with pytest.raises(RequestError, match=r"top_p .* or one per row; got \[0.5, 1.5\]"):
        everystep.TopPLogitsWarper([0.5, 1.5])
    with pytest.raises(RequestError, match="top_k"):
        everystep.TopKLogitsWarper([])


def test_a_callers_processor_is_taken_apart_by_rows() -> None:
    own = everystep.TemperatureLogitsWarper([0.5, 2.0])
    values = merge_configs({})
    (first,) = build(values, Facts(EOS, PROMPT, user=(own,), row=0, rows=2))
    (second,) = build(values, Facts(EOS, PROMPT, user=(own,), row=1, rows=2))
    assert (first.call, second.call) == (
        everystep.TemperatureLogitsWarper(0.5),
        everystep.TemperatureLogitsWarper(2.0),
    )
    with pytest.raises(RequestError, match="does not fit the rows; wanted one number, or 3"):
        build(values, Facts(EOS, PROMPT, user=(own,), row=0, rows=3))


def test_a_subclass_of_ours_that_is_called_with_ids_is_given_ids() -> None:
    seen: list[tuple[int, ...]] = []

    class Mine(everystep.TemperatureLogitsWarper):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(tuple(input_ids.shape))
            return super().__call__(input_ids, scores)

    (user,) = build(merge_configs({}), Facts(user=(Mine(0.5),)))
    assert not user.takes_rows
    assert same(Mine(0.5)(torch.zeros(1, 2).long(), torch.ones(1, 3)), torch.full((1, 3), 2.0))
    assert seen == [(1, 2)]


VALUES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("NoBadWordsLogitsProcessor", ([[1, 2], [3]], 2), {"bad_words_ids": ((1, 2), (3,))}),
    ("SequenceBiasLogitsProcessor", ({(1, 2): -1.0},), {"sequence_bias": (((1, 2), -1.0),)}),
    ("MinLengthLogitsProcessor", (3, 2), {"min_length": 3, "eos_token_id": (2,)}),
    ("SuppressTokensLogitsProcessor", ([1, 4],), {"suppress_tokens": (1, 4)}),
    ("EncoderNoRepeatNGramLogitsProcessor", (2, ENCODER), {"encoder_ngram_size": 2}),
    ("EncoderRepetitionPenaltyLogitsProcessor", (1.25, ENCODER), {"penalty": 1.25}),
    ("EtaLogitsWarper", (0.5,), {"epsilon": 0.5}),
]


@pytest.mark.parametrize(("name", "args", "values"), VALUES, ids=[one[0] for one in VALUES])
def test_attributes_are_the_arguments_as_values(
    name: str, args: tuple[Any, ...], values: dict[str, Any]
) -> None:
    one, other = (getattr(everystep, name)(*args) for _ in range(2))
    assert {key: getattr(one, key) for key in values} == values
    assert one == other
