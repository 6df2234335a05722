"""Samples of sound files: WAV by itself, other kinds through the library soundfile, an extra."""

from __future__ import annotations

import importlib
import io
import math
import os
import wave
from typing import Any, BinaryIO

import numpy as np

from everystep.errors import (
    FormatError,
    MissingExtraError,
    MissingFileError,
    OversizeError,
    RequestError,
)
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
        return _read(opened, str(file), sampling_rate)


def read_sound_bytes(
    data: bytes, sampling_rate: int = 16000, *, most_seconds: float = math.inf
) -> np.ndarray:
    """(n,) float32 samples from -1 to 1 of what a sound file holds, as `read_sound` reads it.

    OversizeError for more seconds than that by its header, before any sample is decoded.
    """
    return _read(io.BytesIO(data), "the sound", sampling_rate, most_seconds)


def _read(
    opened: BinaryIO, name: str, sampling_rate: int, most_seconds: float = math.inf
) -> np.ndarray:
    """(n,) samples of an open file, the mean of its channels."""
    begin = opened.read(12)
    opened.seek(0)
    wav = begin[:4] == b"RIFF" and begin[8:] == b"WAVE"
    samples, rate = (_wav if wav else _soundfile)(opened, name, most_seconds)
    if rate != sampling_rate:
        raise RequestError(
            f"{name} has another sampling rate",
            wanted=f"{sampling_rate} samples per second",
            got=rate,
            do="Resample it first",
        )
    return samples.mean(axis=1, dtype=np.float64).astype(np.float32)


def _require_short(name: str, frames: int, rate: int, most: float) -> None:
    if frames > most * rate:
        raise OversizeError(
            f"{name} is too long",
            wanted=f"at most {most:g} seconds",
            got=f"{frames / rate:.0f} seconds",
            do="Cut it into parts",
        )


def _wav(opened: BinaryIO, file: str, most: float) -> tuple[np.ndarray, int]:
    """(n, channels) samples and their rate."""
    data, width, channels, rate = _frames(opened, file, most)
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


def _frames(opened: BinaryIO, file: str, most: float) -> tuple[bytes, int, int, int]:
    """Return the bytes of whole frames, and the width, number and rate of their samples."""
    try:
        with wave.open(opened, "rb") as read:
            width, channels = read.getsampwidth(), read.getnchannels()
            _require_short(file, read.getnframes(), read.getframerate(), most)
            size, there = read.getnframes() * width * channels, _size(opened)
            if size <= there:
                data, rate = read.readframes(read.getnframes()), read.getframerate()
    except OversizeError:
        raise
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


def _size(opened: BinaryIO) -> int:
    """Return the bytes of a file, or of what is held in its place."""
    return len(opened.getvalue()) if isinstance(opened, io.BytesIO) else size_of(opened)


def _soundfile(opened: BinaryIO, file: str, most: float) -> tuple[np.ndarray, int]:
    try:
        library: Any = importlib.import_module("soundfile")
    except ImportError as error:
        what = f"{file} is no WAV file and"
        do = "convert the file to WAV"
        raise MissingExtraError.of(what, "soundfile", "audio", do=do) from error
    try:
        about = library.info(opened)
        _require_short(file, about.frames, about.samplerate, most)
        opened.seek(0)
        samples, rate = library.read(opened, dtype="float32", always_2d=True)
    except OversizeError:
        raise
    except Exception as error:  # it fails in many ways, all of them the file's fault
        raise FormatError(f"{file} cannot be read: {error}") from error
    if not len(samples):
        raise FormatError(f"{file} holds no samples")
    return samples, int(rate)
