"""`es.transcribe`: sounds in, texts out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack, cast, overload

import numpy as np
from torch import Tensor

from everystep.api.model import LanguageModel
from everystep.config.kinds import FLAG
from everystep.errors import RequestError, UnsupportedError, shown
from everystep.models import Model
from everystep.records import record_writer
from everystep.requests.door import lists_options, sort
from everystep.requests.prompts import TokenizerLike
from everystep.sounds.features import WhisperFeatureExtractor
from everystep.sounds.sound_files import read_sound
from everystep.speech.transcribe import Utterance, listen
from everystep.speech.transcription_options import Speech, read_speech

if TYPE_CHECKING:
    from everystep.requests.keywords import ModelOptions

OneSound = str | os.PathLike[str] | np.ndarray | Tensor
"""A file, or samples (n,) from -1 to 1."""
_OURS = {
    "input_features": "Pass the sound itself, or call model.generate with features",
    "attention_mask": "Leave it out: the length of a sound is known",
    "return_timestamps": "Pass timestamps=True",
    "return_segments": "Read the segments of the result",
    "return_dict_in_generate": "Call model.generate with features",
    "num_return_sequences": "Call model.generate with features",
    "prefix": "Call model.generate with the prefix, which knows its sounds",
}


@dataclass(frozen=True, slots=True)
class Spoken:
    """A stretch of a sound from `start` to `end`, in seconds, and what is said in it; `ids`: what
    was written for it."""

    text: str
    start: float
    end: float
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """The text of a sound, which is also its string.

    `language`: the code of the spoken language, None where the model knows one alone. `segments`:
    its stretches, a single one without timestamps. `ids`: all that was written, timestamps too.
    """

    text: str
    language: str | None
    segments: tuple[Spoken, ...]
    ids: tuple[int, ...]

    def __str__(self) -> str:
        return self.text


@overload
def transcribe(
    model: LanguageModel,
    tokenizer: TokenizerLike,
    sound: OneSound,
    *,
    timestamps: bool = False,
    extractor: WhisperFeatureExtractor | None = None,
    **options: Unpack[ModelOptions],
) -> Transcript: ...


@overload
def transcribe(
    model: LanguageModel,
    tokenizer: TokenizerLike,
    sound: Sequence[OneSound],
    *,
    timestamps: bool = False,
    extractor: WhisperFeatureExtractor | None = None,
    **options: Unpack[ModelOptions],
) -> list[Transcript]: ...


@lists_options("rectangle")
def transcribe(
    model: LanguageModel,
    tokenizer: TokenizerLike,
    sound: OneSound | Sequence[OneSound],
    *,
    timestamps: bool = False,
    extractor: WhisperFeatureExtractor | None = None,
    **options: Unpack[ModelOptions],
) -> Transcript | list[Transcript]:
    """Return what is said in a sound, or in each of several, which are heard side by side.

    `sound`: a file, or samples (n,) from -1 to 1 at the rate that the model reads, mostly 16,000
    per second. Sounds may be longer than the 30 seconds that the model hears at once.
    `timestamps`: the result has a segment for each stretch of speech. `extractor`: what makes
    features of samples; without one, that of the model's size. `options`: as for `model.generate`
    of a model that listens, such as `language`, `task="translate"` or `num_beams`.

    RequestError for what is no sound, UnsupportedError for a model that does not listen.

    Example:

        >>> said = es.transcribe(model, tokenizer, folder / "speech.wav", max_new_tokens=4)
        >>> text = said.text
    """
    if not isinstance(model, LanguageModel) or not model.listens:
        raise UnsupportedError(
            "this model does not listen",
            wanted="a Whisper that es.load returned",
            got=type(model).__name__ if not isinstance(model, LanguageModel) else repr(model),
            do="Load one with es.load",
        )
    FLAG.checked(timestamps, "timestamps")
    for name, do in _OURS.items():
        if dict(options).get(name) is not None:
            raise RequestError(f"transcribe takes no {name}", got=shown(options), do=do)
    extractor = extractor or usual_extractor(model)
    listed = sound if isinstance(sound, list | tuple) else [sound]
    samples = [_samples(one, extractor) for one in listed]
    if not samples:
        raise RequestError("there is no sound", wanted="at least one", got="an empty list")
    found: dict[int, Transcript] = {}
    if (record := options.get("record")) is not None:
        options["record"] = record_writer(record)  # type: ignore[typeddict-item]
    # Short sounds are heard apart: what is said in one does not depend on whether another is long.
    for long in (False, True):
        places = [i for i, one in enumerate(samples) if (len(one) > extractor.n_samples) is long]
        if places:
            group = [samples[place] for place in places]
            speech, utterances = _heard(model, options, group, extractor, timestamps or long)
            for place, one in zip(places, utterances, strict=True):
                seconds = len(samples[place]) / extractor.sampling_rate
                found[place] = _transcript(one, speech, tokenizer, seconds, apart=timestamps)
    ordered = [found[place] for place in range(len(samples))]
    return ordered if listed is sound else ordered[0]


def usual_extractor(model: LanguageModel) -> WhisperFeatureExtractor:
    """Return what makes features of the size that the model reads, all else as usual."""
    channels, span = cast(Model, model.core).network.source_shape
    usual = WhisperFeatureExtractor()
    seconds = span * usual.hop_length // usual.sampling_rate
    return WhisperFeatureExtractor(feature_size=channels, chunk_length=seconds)


def _samples(sound: object, extractor: WhisperFeatureExtractor) -> np.ndarray:
    """Return (n,) the samples of a sound."""
    if isinstance(sound, str | os.PathLike):
        return read_sound(sound, extractor.sampling_rate)
    if isinstance(sound, np.ndarray | Tensor) and sound.ndim == 1:
        return np.asarray(sound)
    raise RequestError(
        "this is no sound",
        wanted="the path of a file, or samples (n,)",
        got=f"shape {tuple(sound.shape)}"
        if isinstance(sound, np.ndarray | Tensor)
        else shown(sound),
        do="Pass one channel; a list holds several sounds",
    )


def _heard(
    model: LanguageModel,
    options: Mapping[str, object],
    samples: list[np.ndarray],
    extractor: WhisperFeatureExtractor,
    stamps: bool,
) -> tuple[Speech, list[Utterance]]:
    """Return how sounds are read, all of which are longer than a window or none, and what is said
    in each."""
    if len(samples[0]) > extractor.n_samples:
        features = extractor(
            samples, truncation=False, padding="longest", return_attention_mask=True
        )
    else:
        features = extractor(samples, return_attention_mask=False)
    given = {**options, **features, "return_timestamps": stamps}
    speech = read_speech(model, sort("rectangle", model, given))
    return speech, listen(model, speech)[0]


def _transcript(
    one: Utterance, speech: Speech, tokenizer: TokenizerLike, seconds: float, *, apart: bool
) -> Transcript:
    """Return what was said in a sound of so many seconds, `apart` by timestamps or as a whole."""
    ids = [token for segment in one.segments for token in segment["tokens"].tolist()]
    text = _text(ids, speech, tokenizer)
    parts = [Spoken(text, 0.0, round(seconds, 2), tuple(ids))]
    if apart:
        parts = [
            Spoken(
                _text(segment["tokens"].tolist(), speech, tokenizer),
                round(min(segment["start"], seconds), 2),
                round(min(segment["end"], seconds), 2),
                tuple(segment["tokens"].tolist()),
            )
            for segment in one.segments
        ]
    return Transcript(text, _language(one, speech), tuple(parts), tuple(ids))


def _text(ids: list[int], speech: Speech, tokenizer: TokenizerLike) -> str:
    said = [token for token in ids if token < speech.first_stamp]
    return str(tokenizer.decode(said, skip_special_tokens=True)).strip()


def _language(one: Utterance, speech: Speech) -> str | None:
    """Return the code of the language that a transcript says that it is in."""
    names = {token: name for name, token in (speech.tokens.languages or {}).items()}
    codes = [names[token].strip("<|>") for token in one.begins if token in names]
    return codes[0] if codes else None
