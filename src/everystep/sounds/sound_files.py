"""Samples of sound files: WAV by itself, other kinds through the library soundfile, an extra."""

from __future__ import annotations

import importlib
import os
import wave
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from everystep.errors import FormatError, MissingExtraError, MissingFileError, RequestError
from everystep.files.opening import as_path, open_regular, size_of


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
    with open_regular(file) as opened:
        begin = opened.read(12)
        opened.seek(0)
        wav = begin[:4] == b"RIFF" and begin[8:] == b"WAVE"
        samples, rate = _wav(opened, file) if wav else _soundfile(file)
    if rate != sampling_rate:
        raise RequestError(
            f"{file} has another sampling rate",
            wanted=f"{sampling_rate} samples per second",
            got=rate,
            do="Resample it first",
        )
    return samples.mean(axis=1, dtype=np.float64).astype(np.float32)


def _wav(opened: BinaryIO, file: Path) -> tuple[np.ndarray, int]:
    """(n, channels) samples and their rate."""
    data, width, channels, rate = _frames(opened, file)
    if width > 4:
        do = "Convert it to 16 bits"
        raise FormatError(
            f"{file} has samples that are too wide", wanted="1 to 4 bytes", got=width, do=do
        )
    if not data:
        raise FormatError(f"{file} holds no samples")
    whole = len(data) // (width * channels)
    table = np.frombuffer(data, dtype=np.uint8).reshape(whole, channels, width)
    if width == 1:
        return (table[..., 0].astype(np.float32) - 128) / 128, rate
    # The highest byte has the sign; the others stand below it.
    wide = np.zeros((whole, channels, 4), dtype=np.uint8)
    wide[..., 4 - width :] = table
    return wide.view("<i4")[..., 0].astype(np.float64) / 2**31, rate


def _frames(opened: BinaryIO, file: Path) -> tuple[bytes, int, int, int]:
    """Return the bytes of whole frames, and the width, number and rate of their samples."""
    try:
        with wave.open(opened, "rb") as read:
            width, channels = read.getsampwidth(), read.getnchannels()
            size, there = read.getnframes() * width * channels, size_of(opened)
            if size <= there:
                data, rate = read.readframes(read.getnframes()), read.getframerate()
    except (wave.Error, EOFError, RuntimeError) as error:  # the last where a chunk leads outside
        # Samples that are floats, or packed, are no part of what the module reads.
        raise FormatError(
            f"{file} is a WAV file that cannot be read: {str(error) or 'its parts contradict it'}",
            wanted="samples that are whole numbers",
            do="Convert it to 16 bits",
        ) from error
    if size > there or len(data) < size:
        what = f"{file} says that it holds more than it does"
        raise FormatError(what, wanted=f"{size} bytes of samples", got=f"a file of {there} bytes")
    return data, width, channels, rate


def _soundfile(file: Path) -> tuple[np.ndarray, int]:
    try:
        library: Any = importlib.import_module("soundfile")
    except ImportError as error:
        what = f"{file} is no WAV file and"
        do = "convert the file to WAV"
        raise MissingExtraError.of(what, "soundfile", "audio", do=do) from error
    try:
        samples, rate = library.read(str(file), dtype="float32", always_2d=True)
    except Exception as error:  # it fails in many ways, all of them the file's fault
        raise FormatError(f"{file} cannot be read: {error}") from error
    if not len(samples):
        raise FormatError(f"{file} holds no samples")
    return samples, int(rate)
