"""Samples of sound files: WAV by itself, other kinds through the library soundfile, an extra."""

from __future__ import annotations

import importlib
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np

from everystep.errors import FormatError, MissingExtraError, MissingFileError, RequestError
from everystep.files.opening import as_path


def read_sound(path: str | os.PathLike[str], sampling_rate: int = 16000) -> np.ndarray:
    """(n,) float32 samples from -1 to 1, the mean of the channels.

    RequestError where the file has another sampling rate, FormatError where it is damaged,
    MissingExtraError for kinds that need the extra `audio`, where that is not installed.

    Example:

        >>> samples = es.read_sound(folder / "speech.wav")
    """
    file = as_path(path)
    if not file.is_file():
        raise MissingFileError(f"{file} is not there")
    with file.open("rb") as opened:
        begin = opened.read(12)
    if begin[:4] == b"RIFF" and begin[8:] == b"WAVE":
        samples, rate = _wav(file)
    else:
        samples, rate = _soundfile(file)
    if rate != sampling_rate:
        raise RequestError(
            f"{file} has another sampling rate",
            wanted=f"{sampling_rate} samples per second",
            got=rate,
            do="Resample it first",
        )
    return samples.mean(axis=1, dtype=np.float64).astype(np.float32)


def _wav(file: Path) -> tuple[np.ndarray, int]:
    """(n, channels) samples and their rate."""
    try:
        with wave.open(str(file), "rb") as opened:
            width, channels = opened.getsampwidth(), opened.getnchannels()
            size = opened.getnframes() * width * channels
            if size > file.stat().st_size:
                what = f"{file} says that it holds more than it does"
                raise FormatError(what, wanted=f"at most {file.stat().st_size} bytes", got=size)
            data, rate = opened.readframes(opened.getnframes()), opened.getframerate()
    except (wave.Error, EOFError) as error:
        # Samples that are floats, or packed, are no part of what the module reads.
        raise FormatError(
            f"{file} is a WAV file that cannot be read: {error}",
            wanted="samples that are whole numbers",
            do="Convert it to 16 bits",
        ) from error
    whole = len(data) // (width * channels)
    flat = np.frombuffer(data[: whole * width * channels], dtype=np.uint8)
    table = flat.reshape(whole, channels, width)
    if not whole:
        raise FormatError(f"{file} holds no samples")
    if width == 1:
        return (table[..., 0].astype(np.float32) - 128) / 128, rate
    # The highest byte has the sign; the others stand below it.
    wide = np.zeros((whole, channels, 4), dtype=np.uint8)
    wide[..., 4 - width :] = table
    return wide.view("<i4")[..., 0].astype(np.float64) / 2**31, rate


def _soundfile(file: Path) -> tuple[np.ndarray, int]:
    try:
        library: Any = importlib.import_module("soundfile")
    except ImportError as error:
        what = f"{file} is no WAV file and"
        do = "convert the file to WAV"
        raise MissingExtraError.of(what, "soundfile", "audio", do=do) from error
    try:
        samples, rate = library.read(str(file), dtype="float32", always_2d=True)
    except library.LibsndfileError as error:
        raise FormatError(f"{file} cannot be read: {error}") from error
    if not len(samples):
        raise FormatError(f"{file} holds no samples")
    return samples, int(rate)
