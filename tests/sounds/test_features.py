"""Features of sounds are transformers', and files give the samples that they hold."""

from __future__ import annotations

import sys
import types
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor as Theirs

import everystep as es
from everystep.errors import (
    EverystepError,
    FormatError,
    OversizeError,
    RequestError,
    UnsupportedError,
)
from everystep.sounds.features import mel_filters
from everystep.sounds.sound_files import read_sound_bytes

RATE = 16000
# transformers sums in float32 where torch is installed, which shows where a mel is quiet.
ROUNDED = 1e-4


def tones(seconds: float) -> np.ndarray:
    """(n,) tones that come and go."""
    time = np.arange(int(seconds * RATE)) / RATE
    both = sum(np.sin(2 * np.pi * f * time) * (0.5 + 0.5 * np.sin(f * time)) for f in (180, 740))
    return (0.2 * both).astype(np.float32)


def speech(seconds: float, seed: int = 0) -> np.ndarray:
    """(n,) tones in noise."""
    rng, tune = np.random.default_rng(seed), tones(seconds)
    return (tune + 0.1 * rng.standard_normal(len(tune))).astype(np.float32)


@pytest.mark.parametrize("mels", [80, 128])
def test_filters_are_the_references(mels: int) -> None:
    assert np.allclose(mel_filters(201, mels, RATE), Theirs(mels).mel_filters, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mels", [80, 128])
def test_features_are_the_references(mels: int) -> None:
    sounds = [speech(3.3), speech(30.0, 1), speech(41.0, 2), speech(0.1, 3)]
    theirs, own = Theirs(mels), es.WhisperFeatureExtractor(mels)
    for given in (sounds[0], sounds[:2], [list(sounds[3])]):
        expected = theirs(given, sampling_rate=RATE, return_tensors="np")["input_features"]
        found = own(given, sampling_rate=RATE)["input_features"]
        assert found.shape == expected.shape and found.dtype == torch.float32
        assert np.abs(found.numpy() - expected).max() < ROUNDED
    (exact,) = theirs._np_extract_fbank_features(sounds[1][None], "cpu")
    assert np.abs(own.spectrum(sounds[1]) - exact).max() < 1e-6


def test_tones_are_those_of_float64() -> None:
    samples = tones(3.0)
    (expected,) = Theirs()._np_extract_fbank_features(samples[None], "cpu")
    assert np.abs(es.WhisperFeatureExtractor().spectrum(samples) - expected).max() < 1e-6


@pytest.mark.parametrize(
    "asked",
    [
        {"padding": "longest", "truncation": False},
        {"max_length": 5 * RATE + 70},
        {"padding": "longest", "max_length": 2 * RATE},
    ],
    ids=str,
)
def test_lengths_and_masks_are_the_references(asked: dict[str, Any]) -> None:
    sounds = [speech(1.01), speech(3.507, 1)]
    given = {"sampling_rate": RATE, "return_attention_mask": True, "return_tensors": "np", **asked}
    expected, found = Theirs()(sounds, **given), es.WhisperFeatureExtractor()(sounds, **given)
    assert np.abs(found["input_features"] - expected["input_features"]).max() < ROUNDED
    assert np.array_equal(found["attention_mask"], expected["attention_mask"])


def test_a_folder_says_what_its_model_reads(tmp_path: Path) -> None:
    Theirs(128, chunk_length=10).save_pretrained(tmp_path)
    found = es.WhisperFeatureExtractor.from_pretrained(tmp_path)
    assert found == es.WhisperFeatureExtractor(128, chunk_length=10)
    assert found(speech(1.0))["input_features"].shape == (1, 128, 1000)


def written(path: Path, samples: np.ndarray, width: int = 2, rate: int = RATE) -> Path:
    """A WAV file of samples (n, channels) from -1 to 1."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype("<i8") + (width == 1) * 128
    data = np.ascontiguousarray(whole)[..., None].view(np.uint8)[..., :width]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(data.tobytes())
    return path


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_files(width: int, tmp_path: Path) -> None:
    both = np.stack([speech(0.2), speech(0.2, 1)], axis=1)
    found = es.read_sound(written(tmp_path / "a.wav", both, width))
    assert found.dtype == np.float32
    assert np.abs(found - both.mean(axis=1)).max() < 2.0 ** (2 - 8 * min(width, 3))


def test_other_files_are_read_by_soundfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.flac"
    path.write_bytes(b"fLaC" + bytes(40))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(UnsupportedError, match=r"everystep\[audio\]"):
        es.read_sound(path)
    known: Any = types.ModuleType("soundfile")
    known.LibsndfileError = OSError
    known.info = lambda _: types.SimpleNamespace(frames=3, samplerate=RATE)
    known.read = lambda *_, **__: (np.full((3, 2), 0.5, np.float32), RATE)
    monkeypatch.setitem(sys.modules, "soundfile", known)
    assert es.read_sound(path).tolist() == [0.5] * 3
    data = path.read_bytes()
    assert read_sound_bytes(data, most_seconds=1.0).tolist() == [0.5] * 3
    known.read = lambda *_, **__: pytest.fail("it was decoded")
    with pytest.raises(OversizeError, match="too long"):
        read_sound_bytes(data, most_seconds=1e-5)


def _cut(path: Path) -> None:
    written(path, speech(0.1)[:, None])
    data = bytearray(path.read_bytes())
    data[40:44] = (2**31 - 2).to_bytes(4, "little")
    path.write_bytes(data)


def changed(place: int, value: bytes) -> Any:
    """Return what writes a file of 16 bits and puts other bytes into it."""

    def write(path: Path) -> None:
        data = bytearray(written(path, speech(0.1)[:, None]).read_bytes())
        data[place : place + len(value)] = value
        path.write_bytes(data)

    return write


def _shortened(path: Path) -> None:
    data = written(path, speech(0.1)[:, None]).read_bytes()
    path.write_bytes(data[:-40])


BROKEN: dict[str, tuple[Any, type[EverystepError], str]] = {
    "another rate": (
        lambda path: written(path, speech(0.1)[:, None], rate=8000),
        RequestError,
        "another sampling rate; wanted 16000",
    ),
    "more than it holds": (_cut, FormatError, "more than it does"),
    "a little more": (_shortened, FormatError, "more than it does"),
    "wide samples": (
        changed(32, b"\x0a\x00\x50\x00"),
        FormatError,
        "too wide; wanted 1 to 4 bytes",
    ),
    "a part that leads outside": (changed(16, b"\xff\xff\xff\x7f"), FormatError, "cannot be read"),
    "a folder of sounds": (lambda path: path.mkdir(), EverystepError, "is not there"),
    "nothing": (lambda path: written(path, np.zeros((0, 1))), FormatError, "no samples"),
    "a header alone": (lambda path: path.write_bytes(b"RIFF\0\0\0\0WAVE"), FormatError, "WAV"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_files_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    make, kind, text = BROKEN[name]
    make(tmp_path / "a.wav")
    with pytest.raises(kind, match=text):
        es.read_sound(tmp_path / "a.wav")
    with pytest.raises(EverystepError, match="is not there"):
        es.read_sound(tmp_path / "b.wav")


WRONG: dict[str, tuple[Any, str]] = {
    "another rate": (lambda own: own(speech(1.0), sampling_rate=8000), "another sampling rate"),
    "channels": (lambda own: own(np.zeros((2, 3, 400))), "no sounds of one channel"),
    "not a number": (lambda own: own([0.0, float("nan")] * 300), "no sounds of one channel"),
    "too short": (lambda own: own([0.0] * 100, padding="longest"), "too short"),
    "another padding": (lambda own: own(speech(1.0), padding="left"), "cannot be given back so"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_are_no_sounds(name: str) -> None:
    call, text = WRONG[name]
    with pytest.raises(RequestError, match=text):
        call(es.WhisperFeatureExtractor())


@pytest.mark.parametrize(
    "text",
    [
        *('{"n_fft": 0}', '{"hop_length": "10"}', '{"dither": 0.1}', "[]", "{", ""),
        *(
            '{"n_fft": 400, "n_fft": 200}',
            '{"padding_value": NaN}',
            '{"a":' * 100 + "1" + "}" * 100,
        ),
    ],
)
def test_folders_that_contradict_themselves(text: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises((FormatError, UnsupportedError)):
        es.WhisperFeatureExtractor.from_pretrained(tmp_path)
