"""Log-mel features of sounds, as Whisper reads them.

Source: Radford et al. 2022; transformers' `WhisperFeatureExtractor`. Sums are taken in float64:
features are its numpy features within 1e-6. Its torch features, sums in float32, are away from both
by 1e-5 as a rule, and by more where a mel is nearly silent beside a loud one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from everystep.errors import FormatError, MissingFileError, RequestError, UnsupportedError, shown
from everystep.files.opening import as_path
from everystep.files.strict_json import read_json

PREPROCESSOR = "preprocessor_config.json"
_TOP = 8000.0  # hertz of the highest mel
_LEAST = 1e-10
_RANGE = 8.0  # powers of ten below the loudest that are told apart


@dataclass(frozen=True)
class WhisperFeatureExtractor:
    """Turns samples into (rows, feature_size, frames) features.

    `feature_size`: mels. `sampling_rate`: samples per second. `hop_length`: samples per frame,
    `n_fft`: samples that a frame looks at. `chunk_length`: seconds of a window. `padding_value`:
    the sample that shorter sounds are filled up with.
    """

    feature_size: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    chunk_length: int = 30
    n_fft: int = 400
    padding_value: float = 0.0
    return_attention_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                wanted = "a whole number of at least 1"
                raise RequestError(f"{name} is impossible", wanted=wanted, got=shown(value))

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> WhisperFeatureExtractor:
        """Return the one that a model's folder describes in preprocessor_config.json.

        MissingFileError where there is none, FormatError for what cannot be, UnsupportedError for
        noise that would be added to every sound.
        """
        path = as_path(folder) / PREPROCESSOR
        if (values := read_json(path)) is None:
            raise MissingFileError(f"{path} is not there", do="Make one: WhisperFeatureExtractor()")
        if values.get("dither"):
            what = "noise that is added to every sound is not supported"
            raise UnsupportedError(what, got=f"dither={values['dither']}")
        names = [one.name for one in fields(cls) if one.name in values]
        own: dict[str, Any] = {name: values[name] for name in names}
        try:
            return cls(**own)
        except RequestError as error:
            raise FormatError(f"{path}: {error}") from error

    @property
    def n_samples(self) -> int:
        """Samples of a window."""
        return self.chunk_length * self.sampling_rate

    @cached_property
    def mel_filters(self) -> np.ndarray:
        """(n_fft // 2 + 1, feature_size) how much each frequency adds to each mel."""
        return mel_filters(1 + self.n_fft // 2, self.feature_size, self.sampling_rate)

    def __call__(
        self,
        raw_speech: Any,
        sampling_rate: int | None = None,
        padding: Literal["max_length", "longest"] = "max_length",
        truncation: bool = True,
        max_length: int | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: Literal["pt", "np"] = "pt",
    ) -> dict[str, Tensor | np.ndarray]:
        """`input_features` (rows, feature_size, frames) of one sound or several, float32; with
        `return_attention_mask` an `attention_mask` (rows, frames) of those that are not filled up.

        `raw_speech`: samples (n,) from -1 to 1, or a list of such. `sampling_rate`: theirs, which
        has to be that of the model. Sounds are filled up to a window, or to `max_length` samples,
        or to the longest of them; longer ones are cut unless `truncation` is False. RequestError
        for what are no sounds.
        """
        if sampling_rate not in (None, self.sampling_rate):
            raise RequestError(
                "the sounds have another sampling rate than the model reads",
                wanted=self.sampling_rate,
                got=sampling_rate,
                do="Resample them first",
            )
        if padding not in ("max_length", "longest") or return_tensors not in ("pt", "np"):
            got = f"padding={padding!r}, return_tensors={return_tensors!r}"
            wanted = "'max_length' or 'longest', and 'pt' or 'np'"
            raise RequestError("sounds cannot be given back so", wanted=wanted, got=got)
        sounds = _listed(raw_speech)
        most = self.n_samples if max_length is None else max_length
        if truncation:
            sounds = [one[:most] for one in sounds]
        width = max(most if padding == "max_length" else 0, *map(len, sounds))
        table = np.full((len(sounds), width), self.padding_value, dtype=np.float32)
        for row, one in zip(table, sounds, strict=True):
            row[: len(one)] = one
        found = {"input_features": np.stack([self.spectrum(row) for row in table])}
        if self.return_attention_mask if return_attention_mask is None else return_attention_mask:
            starts = np.arange(width // self.hop_length) * self.hop_length
            lengths = np.array([len(one) for one in sounds])
            found["attention_mask"] = (starts < lengths[:, None]).astype(np.int64)
        if return_tensors == "np":
            return dict(found)
        return {name: torch.from_numpy(values) for name, values in found.items()}

    def spectrum(self, samples: np.ndarray) -> np.ndarray:
        """(feature_size, frames) float32 features of samples (n,)."""
        half = self.n_fft // 2
        if len(samples) <= half:
            wanted = f"more than {half} samples"
            raise RequestError("a sound is too short", wanted=wanted, got=len(samples))
        padded = np.pad(samples.astype(np.float64), half, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        # The last frame stands where the sound has ended.
        power = np.abs(np.fft.rfft(frames[:-1] * window)) ** 2
        logs = np.log10(np.maximum(power @ self.mel_filters, _LEAST))
        features: np.ndarray = (np.maximum(logs, logs.max() - _RANGE).T + 4.0) / 4.0
        return features.astype(np.float32)


def mel_filters(frequencies: int, mels: int, rate: int) -> np.ndarray:
    """(frequencies, mels) triangles between mels that are evenly apart, each of the same area.

    Up to 1000 hertz a mel is as wide as any, beyond that widths grow as logarithms. Source: Slaney
    1998; transformers' `mel_filter_bank`.
    """
    knee, per_hertz, growth = 1000.0, 3 / 200, 27 / np.log(6.4)
    top = knee * per_hertz + np.log(_TOP / knee) * growth
    places = np.linspace(0.0, top, mels + 2)
    beyond = knee * np.exp((places - knee * per_hertz) / growth)
    edges = np.where(places < knee * per_hertz, places / per_hertz, beyond)
    away = edges - np.linspace(0, rate // 2, frequencies)[:, None]
    widths = np.diff(edges)
    rising, falling = -away[:, :mels] / widths[:-1], away[:, 2:] / widths[1:]
    triangles: np.ndarray = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges[2:] - edges[:mels]))


def _listed(given: Any) -> list[np.ndarray]:
    """Several sounds (n,), whatever they were given as; RequestError for what are none."""
    try:
        several = isinstance(given, list | tuple) and len(given) and np.ndim(given[0]) > 0
        each: Sequence[Any] = given if several else [given]
        if not several and np.ndim(given) == 2:
            each = list(given)
        found = [np.asarray(one, dtype=np.float32) for one in each]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        wanted = "finite samples (n,), or a list of such"
        raise RequestError("these are no sounds", wanted=wanted, got=shown(given)) from error
    for one in found:
        if one.ndim != 1 or not len(one) or not np.isfinite(one).all():
            raise RequestError(
                "these are no sounds of one channel",
                wanted="finite samples (n,), or a list of such",
                got=f"shape {one.shape}",
                do="Give the mean of the channels, and leave out what is not a number",
            )
    return found
