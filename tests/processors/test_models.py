"""Guidance, diversity and the processors of speech models, against transformers' classes."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

import everystep
from everystep.errors import RequestError
from everystep.processors.guidance import contrasted
from tests.processors.making import VOCABULARY, rectangle, same, some_scores

DTYPES = [torch.float32, torch.float64]


def both(name: str, *args: Any, **named: Any) -> tuple[Any, Any]:
    """Our instance and transformers', from the same arguments."""
    return getattr(everystep, name)(*args, **named), getattr(reference, name)(*args, **named)


def compare(ours: Any, theirs: Any, ids: Tensor, scores: Tensor) -> None:
    given = scores.clone()
    assert same(ours(ids, scores), theirs(ids, given.clone()))
    assert same(scores, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ClassifierFreeGuidanceLogitsProcessor", (1.5,)),
        ("ClassifierFreeGuidanceLogitsProcessor", (1e4,)),
        ("DiaClassifierFreeGuidanceLogitsProcessor", (3.0,)),
        ("DiaClassifierFreeGuidanceLogitsProcessor", (3.0, 4)),
    ],
)
def test_guidance_of_both_halves(name: str, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    compare(*both(name, *args), torch.zeros(3, 2).long(), some_scores(6).to(dtype))


@pytest.mark.parametrize("allowed", [None, [4, 9, 30]])
def test_likelihoods_are_contrasted_where_they_are_plausible(allowed: list[int] | None) -> None:
    logits, other = some_scores(3), some_scores(3)
    among = None
    if allowed is not None:
        among = torch.zeros(3, VOCABULARY, dtype=torch.bool)
        among[:, allowed] = True
    found = contrasted(logits, other, alpha=0.2, beta=0.7, allowed=among)
    for r in range(3):
        p, q = logits[r].softmax(dim=0).tolist(), other[r].softmax(dim=0).tolist()
        highest = max(p if allowed is None else [p[i] for i in allowed])
        for i in range(VOCABULARY):
            if p[i] < 0.2 * highest:
                assert found[r, i] == -torch.inf
            else:
                wanted = math.log(p[i]) - 0.7 * math.log(q[i])
                assert float(found[r, i]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        assert 0 < int(found[r].isfinite().sum()) < VOCABULARY


class Model:
    """Logits that depend on all ids read so far; its cache is the list of them."""

    def __call__(
        self, ids: Tensor, attention_mask: Tensor, use_cache: bool, past_key_values: Any
    ) -> Any:
        seen = ids if past_key_values is None else torch.cat([past_key_values, ids], dim=1)
        assert attention_mask.shape == seen.shape
        weights = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(1))
        logits = weights[seen].cumsum(dim=1)[:, -ids.shape[1] :]
        past = seen if use_cache else None
        return reference_output(logits, past)


def reference_output(logits: Tensor, past: Any) -> Any:
    class Output(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    return Output(logits=logits, past_key_values=past)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("scale", [1, 0.5, 2.5])
@pytest.mark.parametrize("prompt", [None, torch.tensor([[1, 2, 3], [4, 5, 6]])])
def test_guidance_by_calls_of_its_own(prompt: Any, scale: float, use_cache: bool) -> None:
    name = "UnbatchedClassifierFreeGuidanceLogitsProcessor"
    ours, theirs = both(name, scale, Model(), prompt, None, use_cache)
    ids = torch.tensor([[7, 8], [9, 10]])
    for _ in range(4):
        compare(ours, theirs, ids, some_scores(2))
        ids = torch.cat([ids, torch.randint(0, 37, (2, 1))], dim=1)


class Config(SimpleNamespace):
    no_timestamps_token_id = 20
    eos_token_id = 15
    bos_token_id = 14


@pytest.mark.parametrize("detects", [None, True, False])
@pytest.mark.parametrize("latest", [None, 3])
@pytest.mark.parametrize("length", [2, 3, 4, 8])
def test_whisper_timestamps(length: int, latest: int | None, detects: bool | None) -> None:
    config = Config(max_initial_timestamp_index=latest)
    ours, theirs = both("WhisperTimeStampLogitsProcessor", config, 2, detects)
    ids = torch.randint(12, VOCABULARY, (40, length))
    for dtype in DTYPES:
        compare(ours, theirs, ids, some_scores(40).to(dtype))
    ours.set_begin_index(1)
    theirs.set_begin_index(1)
    compare(ours, theirs, ids, some_scores(40))


@pytest.mark.parametrize("logs", [True, False])
def test_whisper_silence(logs: bool) -> None:
    ours, theirs = both("WhisperNoSpeechDetection", 5, 1, logs)
    assert ours.no_speech_prob == [0.0]
    for width in (1, 2):
        compare(ours, theirs, torch.zeros(3, width), some_scores(3).log_softmax(-1))
    assert same(ours.no_speech_prob, theirs.no_speech_prob)


def test_whisper_silence_is_read_off_the_start_token() -> None:
    class Listener:
        logits = some_scores(2 * 6).view(2, 6, VOCABULARY)

        def prepare_inputs_for_generation(self, **inputs: Any) -> dict[str, Any]:
            return {"input_ids": 1, "decoder": inputs["decoder"]}

        def forward(self, input_features: Any, decoder: Any) -> None: ...

        def __call__(self, input_features: Any, decoder: Any, **more: Any) -> Any:
            return SimpleNamespace(logits=self.logits)

    ours, theirs = both("WhisperNoSpeechDetection", 5, 3)
    for one in (ours, theirs):
        one.set_begin_index(4)
        one.set_model(Listener())
        one.set_inputs({"inputs": 1, "decoder": 2})
    compare(ours, theirs, torch.zeros(2, 4), some_scores(2))
    assert same(ours.no_speech_prob, theirs.no_speech_prob)


@pytest.mark.parametrize("length", [4, 5])
def test_alternating_codebooks(length: int) -> None:
    ids = torch.zeros(3, length).long()
    compare(*both("AlternatingCodebooksLogitsProcessor", 4, 10, 12), ids, some_scores(3))


@pytest.mark.parametrize("least", [None, 0.01, 0.2, 5.0])
def test_bark_ends_where_it_may(least: float | None) -> None:
    pair = both("BarkEosPrioritizerLogitsProcessor", [3, 9], least)
    compare(*pair, torch.zeros(30, 2).long(), some_scores(30))


DIA_SHAPES = pytest.mark.parametrize("shape", [(-1,), (-1, 3)], ids=["rows", "channels"])


@DIA_SHAPES
def test_dia_ends_in_its_first_channel(shape: tuple[int, ...]) -> None:
    pair = both("DiaEOSChannelFilterLogitsProcessor", 3, 2)
    scores = some_scores(90)
    scores[::2, 2] += 9
    compare(*pair, torch.zeros(30, 2).long(), scores.reshape(*shape, scores.shape[-1]))


@DIA_SHAPES
def test_dia_ends_each_channel_after_its_delay(shape: tuple[int, ...]) -> None:
    ours, theirs = both("DiaEOSDelayPatternLogitsProcessor", [0, 2, 3], 2, 14)
    for length in range(4, 15):
        scores = some_scores(4 * 3)
        scores[3 * (length % 4), 2] += 20
        scores = scores.reshape(*shape, scores.shape[-1])
        compare(ours, theirs, torch.zeros(4, length).long(), scores)


@pytest.mark.parametrize("group", [0, 1, 2])
def test_groups_lose_what_earlier_groups_chose(group: int) -> None:
    ours = everystep.HammingDiversityLogitsProcessor(0.7, num_beams=6, num_beam_groups=3)
    chosen, scores = torch.randint(0, 3, (2 * 6,)), some_scores(2 * 2)
    result = ours(torch.zeros(4, 2), scores, chosen, group)
    for batch, beam in itertools.product(range(2), range(2)):
        expected = scores[2 * batch + beam].clone()
        for token in chosen[6 * batch : 6 * batch + 2 * group].tolist():
            expected[token] -= 0.7
        assert torch.allclose(result[2 * batch + beam], expected)
    listed = everystep.LogitsProcessorList([ours])
    named = {"current_tokens": chosen, "beam_group_idx": group}
    assert same(listed(torch.zeros(4, 2), scores, **named), result)


def test_keywords_that_a_processor_of_a_list_needs_are_asked_for() -> None:
    listed = everystep.LogitsProcessorList([everystep.HammingDiversityLogitsProcessor(1.0, 2, 2)])
    with pytest.raises(RequestError, match="Pass current_tokens, beam_group_idx as keywords"):
        listed(torch.zeros(2, 1), some_scores(2))


def test_a_list_runs_in_order_and_mixes_with_functions() -> None:
    ids = torch.tensor(rectangle(3, 6))
    ours = everystep.LogitsProcessorList(
        [everystep.RepetitionPenaltyLogitsProcessor(1.3), lambda ids, scores: scores + ids[:, -1:]]
    )
    ours.append(everystep.TopKLogitsWarper(4))
    theirs = reference.LogitsProcessorList(
        [
            reference.RepetitionPenaltyLogitsProcessor(1.3),
            ours[1],
            reference.TopKLogitsWarper(4),
        ]
    )
    compare(ours, theirs, ids, some_scores(3))
