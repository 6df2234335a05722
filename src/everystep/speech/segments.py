"""The ids of a window of sounds, cut at its timestamps; and whether to believe them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

SECONDS = 0.02
"""What one step of a timestamp stands for."""
STRIDE = 2
"""Frames of features per state of the encoder, and per step of a timestamp."""


class SpeechSegment(TypedDict):
    """A stretch of speech between two timestamps.

    `start`, `end`: seconds. `tokens`: (n,) ids, timestamps among them. `result`: of its window.
    """

    start: float
    end: float
    tokens: Tensor
    result: object


def segments_of(
    tokens: np.ndarray, first_stamp: int, seek: int, frames: int, result: object
) -> tuple[list[SpeechSegment], int]:
    """Return the segments of a window's ids (n,), and how many frames on the next window begins.

    The window begins at frame `seek`, of which `frames` hold sounds. Two timestamps beside each
    other end a segment and begin the next; what follows the last such pair is heard again. Source:
    Radford et al. 2022; transformers' `_retrieve_segment`.
    """
    offset = seek * SECONDS / STRIDE
    stamps = tokens >= first_stamp
    ends = (np.flatnonzero(stamps[:-1] & stamps[1:]) + 1).tolist()
    if not ends:
        places = np.flatnonzero(stamps)
        last = float(frames // STRIDE)
        if len(places) and tokens[places[-1]] != first_stamp:
            last = float(tokens[places[-1]] - first_stamp)
        return [_segment(offset, 0.0, last, tokens, result)], frames
    single = stamps[-2:].tolist() == [False, True]
    if single:
        ends.append(len(tokens))
    else:
        ends[-1] += 1  # the last timestamp says that it is not alone
    found, begin = [], 0
    for number, end in enumerate(ends, 1):
        own = tokens[begin:end]
        closing = own[-1] if number < len(ends) or single else own[-2]
        first, last = float(own[0] - first_stamp), float(closing - first_stamp)
        found.append(_segment(offset, first, last, own, result))
        begin = end
    # Stamps that a caller's own processors let stand still must not stop the windows.
    further = max(int(tokens[begin - 2] - first_stamp), 1) * STRIDE
    return found, frames if single else further


def _segment(
    offset: float, first: float, last: float, tokens: np.ndarray, result: object
) -> SpeechSegment:
    start, end = offset + first * SECONDS, offset + last * SECONDS
    return {"start": start, "end": end, "tokens": torch.from_numpy(tokens), "result": result}


def without_second_stamp(tokens: Sequence[int], first_stamp: int) -> Sequence[int]:
    """Return the ids of a segment as they are read before the next window: of two timestamps at the
    end one."""
    return tokens[:-1] if len(tokens) > 2 and tokens[-2] >= first_stamp else tokens


@dataclass(frozen=True)
class Doubts:
    """The thresholds beyond which a window is tried again at the next temperature, None for never.

    `compression`: how much shorter its ids may get when they are packed; what repeats itself gets
    much shorter. `logprob`: how likely its ids are at least, on average. `no_speech`: how likely
    silence is at most, where the ids are not likely enough; beyond that the window is silent.
    """

    compression: float | None = None
    logprob: float | None = None
    no_speech: float | None = None

    def judge(
        self, tokens: np.ndarray, vocabulary: int, logprob: float, silence: float
    ) -> tuple[bool, bool]:
        """Return whether a window is to be tried again, and whether it is silent."""
        unlikely = self.logprob is not None and logprob < self.logprob
        again = unlikely
        if self.compression is not None:
            again = again or compression_ratio(tokens, vocabulary) > self.compression
        if unlikely and self.no_speech is not None and silence > self.no_speech:
            return False, True
        return again, False


def compression_ratio(tokens: np.ndarray, vocabulary: int) -> float:
    """Return the size of ids as bytes, as a multiple of what zlib makes of them."""
    size = int(math.log2(vocabulary) / 8) + 1
    whole = b"".join(int(token).to_bytes(size, "little") for token in tokens)
    return len(whole) / len(zlib.compress(whole))


def mean_logprob(scores: Sequence[Tensor], tokens: np.ndarray, temperature: float | None) -> float:
    """Return the mean log-probability of ids (n,), of scores (V,) for each that a temperature
    divided."""
    steps = torch.stack(list(scores)[: len(tokens)])
    logs = torch.log_softmax((steps * (temperature or 1.0)).float(), dim=-1)
    chosen = torch.from_numpy(tokens[-len(steps) :]).to(logs.device)
    own = logs.gather(-1, chosen[:, None])
    return float(own.sum()) / len(tokens)
