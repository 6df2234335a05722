"""`es.transcribe` writes down as text what `model.generate` writes down as ids."""

from __future__ import annotations

import json
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, UnsupportedError
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import ours, reference_pair

WORDS, RATE = 320, 16000
SPECIAL: dict[str, Any] = {
    "lang_to_id": {"<|en|>": 321, "<|de|>": 322},
    "task_to_id": {"transcribe": 324, "translate": 325},
    "prev_sot_token_id": 326,
    "no_timestamps_token_id": 328,
    "is_multilingual": True,
    "suppress_tokens": [*range(WORDS, 328)],
    "begin_suppress_tokens": None,
    "return_timestamps": False,
}
IDS = {"decoder_start_token_id": 323, "eos_token_id": 320, "pad_token_id": 320}
EXTRACTOR = es.WhisperFeatureExtractor(feature_size=5, hop_length=500, chunk_length=1)


@cache
def reference() -> Any:
    torch.manual_seed(0)
    made = reference_pair("whisper", torch.float32, decoder_layers=2, vocab_size=400)
    made.generation_config.update(**IDS, max_length=24)
    for name, value in SPECIAL.items():
        setattr(made.generation_config, name, value)
    return made


@cache
def whisper() -> es.LanguageModel:
    settings = es.GenerationConfig.from_checkpoint(reference().generation_config.to_diff_dict())
    return es.LanguageModel(ours(reference()), settings)


def sound(seconds: float, tone: float = 440.0) -> np.ndarray:
    return np.sin(np.arange(int(seconds * RATE)) * 2 * np.pi * tone / RATE).astype(np.float32)


def written(samples: np.ndarray, path: Path) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return path


def text_of(ids: list[int]) -> str:
    return tiny_tokenizer(WORDS).decode(ids, skip_special_tokens=True).strip()


def heard(*sounds: Any, **options: Any) -> Any:
    options = {"extractor": EXTRACTOR, **options}
    several = list(sounds) if len(sounds) > 1 else sounds[0]
    return es.transcribe(whisper(), tiny_tokenizer(WORDS), several, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("given", [{}, {"language": "de"}, {"task": "translate", "num_beams": 2}])
def test_a_short_sound_is_the_text_of_the_references_ids(given: dict[str, Any]) -> None:
    samples = sound(0.7)
    expected = reference().generate(**EXTRACTOR(samples), **given)[0].tolist()
    found = heard(samples, **given)
    said = [one for one in expected if one < WORDS]
    assert [one for one in found.ids if one < WORDS] == said
    assert len(said) > 2
    assert found.text == str(found) == text_of(said)
    assert [(one.text, one.start, one.end) for one in found.segments] == [(found.text, 0.0, 0.7)]
    assert found.language == ("de" if given.get("language") else found.language)
    assert found.language in ("en", "de")


@pytest.mark.filterwarnings("ignore")
def test_a_long_sound_has_segments_with_times() -> None:
    samples = sound(2.5, 300.0)
    features = EXTRACTOR(samples, truncation=False, padding="longest", return_attention_mask=True)
    asked = {"language": "en", "return_timestamps": True, "return_segments": True}
    expected = reference().generate(**features, **asked)["segments"][0]
    found = heard(samples, language="en", timestamps=True)
    assert len(found.segments) == len(expected) > 1
    for own, theirs in zip(found.segments, expected, strict=True):
        ids = [one for one in theirs["tokens"].tolist() if one < WORDS]
        assert own.text == text_of(ids)
        assert abs(own.start - float(theirs["start"])) < 0.006
        assert own.end <= 2.5
    whole = heard(samples, language="en")
    assert len(whole.segments) == 1
    assert whole.ids == found.ids


def test_sounds_together_are_what_they_are_alone(tmp_path: Path) -> None:
    first, second = sound(0.5), sound(1.0, 900.0)
    file = written(first, tmp_path / "first.wav")
    third = sound(1.9, 600.0)
    several = heard(file, torch.from_numpy(second), third)
    alone = [heard(es.read_sound(file)), heard(second), heard(third)]
    assert several == alone
    assert heard(str(file)) == alone[0]


def record_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a record without times, and without seeds that decide nothing."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for name in ("seconds", "seed"):
            line.pop(name, None)
    return lines


@pytest.mark.parametrize("given", [{}, {"num_beams": 2}, {"language": "de"}])
def test_a_record_is_that_of_the_plain_call(given: dict[str, Any], tmp_path: Path) -> None:
    samples = sound(0.7)
    found = heard(samples, **given, record=tmp_path / "a")
    features = EXTRACTOR(samples, return_attention_mask=False)
    ids = whisper().generate(**features, **given, return_timestamps=False, record=tmp_path / "b")
    assert found == heard(samples, **given)
    lines = record_of(tmp_path / "a")
    assert lines == record_of(tmp_path / "b")
    told = [id for line in lines if line["type"] == "tokens" for id in line["ids"]]
    # A text may be cut; the record has all that was chosen.
    assert tuple(told)[: len(found.ids)] == found.ids == tuple(ids[0].tolist())


def test_short_and_long_sounds_are_runs_of_one_record(tmp_path: Path) -> None:
    """A sound that is longer than a window is heard after the others, window by window."""
    sounds = sound(1.9, 600.0), sound(0.5)
    long, short = heard(*sounds, language="en", record=tmp_path / "a.jsonl")
    assert [long, short] == heard(*sounds, language="en")
    runs = es.read_record(tmp_path / "a.jsonl").runs.values()
    written = [[id for id in run.tokens[0] if id < WORDS] for run in runs]
    assert written[0] == [id for id in short.ids if id < WORDS]
    assert len(written) > 2
    told = [id for own in written[1:] for id in own]
    assert [id for id in long.ids if id < WORDS] == told[: len(told)]


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "two channels": (np.zeros((2, 900)), {}, r"no sound.*shape \(2, 900\)"),
    "a number": (3, {}, "no sound.*path of a file"),
    "numbers": ([0.5, 0.25], {}, "no sound"),
    "nothing": ([], {}, "there is no sound"),
    "features": (sound(0.5), {"input_features": torch.zeros(1, 5, 32)}, "takes no input_features"),
    "segments": (sound(0.5), {"return_segments": True}, "takes no return_segments"),
    "a language": (sound(0.5), {"language": "klingon"}, "does not know the language"),
    "a keyword": (sound(0.5), {"langage": "en"}, "knows no argument"),
    "a flag": (sound(0.5), {"timestamps": "yes"}, "timestamps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said(what: str) -> None:
    given, options, told = WRONG[what]
    with pytest.raises(EverystepError, match=told):
        es.transcribe(whisper(), tiny_tokenizer(WORDS), given, extractor=EXTRACTOR, **options)


def test_a_model_that_reads_does_not_listen() -> None:
    with pytest.raises(UnsupportedError, match=r"does not listen.*wanted a Whisper"):
        es.transcribe(tiny_llama(), tiny_tokenizer(), sound(0.5))


def listener() -> es.LanguageModel:
    """A model that hears two seconds at once, in features of 8 mels."""
    sizes = {"num_mel_bins": 8, "max_source_positions": 100, "vocab_size": 400}
    torch.manual_seed(0)
    made = reference_pair("whisper", torch.float32, **sizes)
    settings = {**SPECIAL, **IDS, "max_length": 12}
    return es.LanguageModel(ours(made), es.GenerationConfig.from_checkpoint(settings))


def test_the_usual_extractor_has_the_size_of_the_model() -> None:
    model = listener()
    usual = es.WhisperFeatureExtractor(feature_size=8, chunk_length=2)
    found = es.transcribe(model, tiny_tokenizer(WORDS), sound(1.5), language="en")
    given = es.transcribe(model, tiny_tokenizer(WORDS), sound(1.5), language="en", extractor=usual)
    assert found == given
