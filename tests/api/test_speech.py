"""Whisper writes down what transformers writes: windows, timestamps, languages, retries."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.errors import EverystepError, RequestError, UnsupportedError
from everystep.speech.segments import segments_of
from everystep.testing.models import tiny_llama
from everystep.text.languages import LANGUAGES
from tests.models.tiny import ours, reference_pair, sounds

CHANNELS, SPAN = 5, 32
SPECIAL: dict[str, Any] = {
    "lang_to_id": {"<|en|>": 61, "<|de|>": 62, "<|fr|>": 63},
    "task_to_id": {"transcribe": 64, "translate": 65},
    "prev_sot_token_id": 66,
    "no_timestamps_token_id": 68,
    "is_multilingual": True,
    "suppress_tokens": [5, 6, *range(60, 68)],
    "begin_suppress_tokens": [9, 59],
    "max_initial_timestamp_index": 4,
    "return_timestamps": False,
}
IDS = {"decoder_start_token_id": 60, "eos_token_id": 59, "pad_token_id": 59, "bos_token_id": 59}
PROMPT = torch.tensor([66, 11, 12])


@cache
def pair() -> tuple[Any, es.LanguageModel]:
    """A tiny Whisper whose special ids are named, in both libraries."""
    torch.manual_seed(0)
    reference = reference_pair("whisper", torch.float64, decoder_layers=2)
    settings = reference.generation_config
    settings.update(**IDS, max_length=40)
    for name, value in SPECIAL.items():
        setattr(settings, name, value)
    own = es.GenerationConfig.from_checkpoint(settings.to_diff_dict())
    return reference, es.LanguageModel(ours(reference), own)


def heard(frames: int, rows: int = 2) -> dict[str, Tensor]:
    """Sounds of so many frames, of which the first row has fewer."""
    generator = torch.Generator().manual_seed(frames)
    x = torch.randn(rows, CHANNELS, frames, dtype=torch.float64, generator=generator)
    mask = torch.ones(rows, frames, dtype=torch.int64)
    mask[0, 50:] = 0
    return {"input_features": x, "attention_mask": mask} if frames > SPAN else {"input_features": x}


STAMPS = {"language": "en", "return_timestamps": True}
DOUBTS = {"logprob_threshold": -1.0, "no_speech_threshold": 0.01}
WAYS: dict[str, dict[str, Any]] = {
    "a language": {"language": "en"},
    "a language by its name, a task": {"language": "german", "task": "translate"},
    "a language that is found out": {},
    "a task alone": {"task": "translate"},
    "a language for each row": {"language": ["<|en|>", "fr"]},
    "beams": {"language": "en", "num_beams": 3},
    "few tokens": {"language": "en", "max_new_tokens": 7},
    "several answers": {"language": "en", "num_return_sequences": 2, "num_beams": 2},
    "no repetition": {"language": "en", "no_repeat_ngram_size": 2},
    "timestamps": STAMPS,
    "timestamps and beams": {**STAMPS, "num_beams": 2},
    "a prompt": {"language": "en", "prompt_ids": PROMPT},
    "a prompt before timestamps": {**STAMPS, "prompt_ids": PROMPT},
    "sampling": {"language": "en", "temperature": 0.7},
    "second attempts": {
        **STAMPS,
        **DOUBTS,
        "temperature": (0.0, 0.5, 0.9),
        "compression_ratio_threshold": 1.0,
    },
}
LONG: dict[str, dict[str, Any]] = {
    "windows": STAMPS,
    "windows, found out": {"return_timestamps": True},
    "what was said before": {**STAMPS, "condition_on_prev_tokens": True},
    "a prompt and what was said": {
        **STAMPS,
        "condition_on_prev_tokens": True,
        "prompt_ids": PROMPT,
    },
    "a prompt everywhere": {
        **STAMPS,
        "condition_on_prev_tokens": True,
        "prompt_ids": PROMPT,
        "prompt_condition_type": "all-segments",
    },
    "second attempts": {
        **STAMPS,
        "temperature": (0.0, 0.4, 0.9),
        "compression_ratio_threshold": 0.8,
        "logprob_threshold": -3.0,
        "no_speech_threshold": 0.6,
    },
}


def both(given: dict[str, Any]) -> tuple[Any, Any]:
    """What both libraries write down."""
    results = []
    for model in pair():
        torch.manual_seed(3)
        results.append(model.generate(**given))
    return results[0], results[1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_a_window_becomes_what_it_becomes_there(way: str) -> None:
    expected, found = both({**heard(SPAN), **WAYS[way]})
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", LONG)
def test_sounds_of_several_windows(way: str) -> None:
    expected, found = both({**heard(75), **LONG[way]})
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["windows", "what was said before", "a prompt everywhere"])
def test_a_smaller_model_drafts_and_the_transcript_stays(way: str) -> None:
    expected, found = both({**heard(75), **LONG[way]})
    _, model = pair()
    torch.manual_seed(9)
    small = es.LanguageModel(ours(reference_pair("whisper", torch.float64, decoder_layers=1)))
    for drafts in ({"assistant_model": model}, {"assistant_model": small}):
        said = model.generate(**heard(75), **LONG[way], **drafts, num_assistant_tokens=3)
        assert torch.equal(said, found) and torch.equal(said, expected)


@pytest.mark.filterwarnings("ignore")
def test_segments_say_when_they_were_said() -> None:
    expected, found = both({**heard(75), **STAMPS, "return_segments": True})
    assert torch.equal(found["sequences"], expected["sequences"])
    for own, theirs in zip(found["segments"], expected["segments"], strict=True):
        times = [(one["start"], one["end"], one["tokens"].tolist()) for one in own]
        assert times == [(float(s["start"]), float(s["end"]), s["tokens"].tolist()) for s in theirs]


@pytest.mark.filterwarnings("ignore")
def test_the_output_object_of_one_window() -> None:
    asked = {"return_dict_in_generate": True, "output_scores": True}
    expected, found = both({**heard(SPAN), "language": "en", **asked})
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.scores, expected.scores, strict=True):
        assert torch.allclose(one, other.to(one.dtype), atol=1e-5)


def test_logits_of_encoder_states_and_of_sounds_are_the_same() -> None:
    reference, model = pair()
    read, written = sounds(2, torch.float64), torch.tensor([[60, 61, 7], [60, 62, 9]])
    with torch.no_grad():
        states = reference.get_encoder()(read)
        whole = model(input_features=read, decoder_input_ids=written).logits
        part = model(encoder_outputs=states, decoder_input_ids=written).logits
    assert torch.allclose(whole, part, rtol=0, atol=1e-12)


def test_two_stamps_that_stand_still_do_not_stop_the_windows() -> None:
    _, further = segments_of(torch.tensor([70, 7, 70, 70, 8]).numpy(), 70, 0, 30, None)
    assert further == 2


def test_languages_are_those_of_the_reference() -> None:
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    assert dict(LANGUAGES) == TO_LANGUAGE_CODE


WRONG: dict[str, tuple[dict[str, Any], type[EverystepError], str]] = {
    "no sounds": ({}, RequestError, "input_features are no sounds"),
    "whole numbers": (
        {"input_features": torch.ones(1, CHANNELS, SPAN, dtype=torch.int64)},
        RequestError,
        "input_features are no sounds",
    ),
    "other channels": (
        {"input_features": torch.randn(1, 4, SPAN)},
        RequestError,
        r"wanted a float tensor \(rows, 5, frames\); got \(1, 4, 32\)",
    ),
    "an unknown language": ({**heard(SPAN), "language": "elvish"}, RequestError, "elvish"),
    "a language of others": ({**heard(SPAN), "language": "welsh"}, RequestError, "welsh"),
    "languages of other rows": ({**heard(SPAN), "language": ["en"]}, RequestError, "does not fit"),
    "an unknown task": ({**heard(SPAN), "task": "sing"}, RequestError, "no such task"),
    "rows without their ends": (
        {"input_features": torch.randn(2, CHANNELS, 75)},
        RequestError,
        "need to say where each ends",
    ),
    "windows without timestamps": (
        {**heard(75), "return_timestamps": False},
        RequestError,
        "more than one window",
    ),
    "words in time": (
        {**heard(SPAN), "return_token_timestamps": True},
        UnsupportedError,
        "return_token_timestamps asks for times of tokens",
    ),
    "no room": ({**heard(SPAN), "max_new_tokens": 40}, RequestError, "has no room"),
    "samples of nothing": ({**heard(SPAN), "do_sample": True}, RequestError, "at a temperature"),
    "silence of nothing": (
        {**heard(SPAN), "no_speech_threshold": 0.5},
        RequestError,
        "read together with logprob_threshold",
    ),
    "a prompt of two rows": (
        {**heard(SPAN), "prompt_ids": torch.ones(2, 2, dtype=torch.int64)},
        RequestError,
        "prompt_ids are no row of ids",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_an_error(name: str) -> None:
    given, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        pair()[1].generate(**given)


@pytest.mark.filterwarnings("ignore")
def test_every_face_reads_sounds(tmp_path: Any) -> None:
    """Each transcript begins with the start token alone, as nothing else is said there."""
    _, model = pair()
    features = heard(SPAN)["input_features"]
    start = {"decoder_input_ids": torch.full((2, 1), 60), "suppress_tokens": None}
    plain = {"max_new_tokens": 5, "suppress_tokens": None}
    expected = model.generate(features, **start, max_new_tokens=5).tolist()
    prompts = [{"input_features": features[0]}, {"input_features": features[1:]}]
    many = es.generate(model, None, prompts, **plain)
    assert [len(row) for row in many] == [len(row) for row in expected]
    run = es.open(model, None, prompts[0], **plain)
    next(run)
    run.save(tmp_path / "run")
    assert list(es.resume(tmp_path / "run", model, None).result().tokens) == many[0]


WRONG_PROMPTS: dict[str, tuple[Any, str]] = {
    "ids": ([1, 2, 3], r"reads sounds.*wanted a prompt \{'input_features': .*got list"),
    "a text": ("Hello", "this model reads sounds, and no text.*got str.*WhisperFeatureExtract"),
    "messages": ([{"role": "user", "content": "Hello"}], "got list.*es.read_sound"),
    "samples": (torch.zeros(160), "got Tensor"),
    "a text in a mapping": ({"text": "Hello"}, "reads sounds, and no text.*got text"),
    "nothing": ({"input_features": None}, "reads sounds.*got none of them"),
    "both": ({"input_features": torch.randn(5, 32), "text": "a"}, "got input_features, text"),
    "too few frames": ({"input_features": torch.randn(CHANNELS, 9)}, "does not fit the model"),
    "no tensor": ({"input_features": [1.0]}, "does not fit the model"),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_prompts_that_are_no_sounds(name: str) -> None:
    prompt, text = WRONG_PROMPTS[name]
    with pytest.raises(RequestError, match=text):
        es.generate(pair()[1], None, [prompt], max_new_tokens=3)
    with pytest.raises(UnsupportedError, match=r"Call model\.generate"):
        es.generate(pair()[1], None, [{"input_features": heard(SPAN)}], language="en")


def test_sounds_for_a_model_that_reads_text_are_refused() -> None:
    model, features = tiny_llama(), torch.randn(CHANNELS, SPAN)
    for call in (
        lambda: es.generate(model, None, [{"input_features": features}]),
        lambda: list(es.stream(model, None, {"input_features": features})),
        lambda: model.generate(input_features=features[None]),
    ):
        with pytest.raises(UnsupportedError, match=r"sounds, which this model.*Load a Whisper"):
            call()
    with pytest.raises(RequestError, match="sounds are read by a Whisper alone"):
        es.generate(model, None, torch.zeros(160))
    with pytest.raises(UnsupportedError, match="images, which this model does not read"):
        es.generate(model, None, {"input_ids": [1], "pixel_values": features})
