"""Processors against repetition: of ids in the prefix, in the encoder's prompt, or generated.

Pad ids of the prefix count as transformers counts them: not for penalties, but for n-grams. Ids
beyond the width of the scores can never be chosen and are passed over. What stands in a prefix is
remembered where rows go on, and read off its ids where they are given by hand. What is not
transformers' names its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import (
    AT_LEAST_1,
    COUNT,
    NOT_NEGATIVE,
    ONE_OR_MORE_IDS,
    PENALTY,
    POSITIVE,
    SIZE,
    Kind,
    is_integer,
    is_list,
)
from everystep.devices import on_device
from everystep.processors.base import Editing, Overwriting, remembers
from everystep.processors.edits import Edit, Stretch, alike, banned, revised, stretches
from everystep.processors.remembered import NGrams, Occurrences, remembered
from everystep.processors.stacking import Argument, Counts, Numbers
from everystep.types import Rows


def _prompts(given: Any) -> tuple[tuple[int, ...], ...]:
    """Return (S,) or (B, S) ids as a tuple per prompt."""
    nested = given if given and isinstance(given[0], list | tuple) else [given]
    return tuple(tuple(map(int, row)) for row in nested)


def _owners(rows: int, prompts: int) -> np.ndarray:
    """Return (R,) the index of each row's prompt.

    Every prompt has equally many rows, one after another.
    """
    return np.arange(rows) // max(rows // prompts, 1)


def _are_prompts(value: Any) -> bool:
    return is_list(value, is_integer) or is_list(value, lambda row: is_list(row, is_integer))


_PROMPTS = Argument("encoder_input_ids", Kind("a list of ids, or several", _are_prompts, _prompts))


@dataclass(frozen=True)
class RepetitionPenaltyLogitsProcessor(Overwriting):
    """Penalises every id that stands in the prefix (Keskar et al. 2019).

    `prompt_ignore_length`: how many ids at the start do not count; None: each row's pad prefix.
    """

    penalty: Numbers
    prompt_ignore_length: Counts | None = None

    per_row = (
        Argument("penalty", POSITIVE, "repetition_penalty"),
        Argument("prompt_ignore_length", COUNT, optional=True),
    )

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        starts = self.prompt_ignore_length
        if starts is None:
            starts = tuple(sequence.request.pad_prefix for sequence in rows.sequences)
        elif not isinstance(starts, tuple):
            starts = (starts,) * len(rows)
        tokens = _standing(rows, starts, scores.shape[-1])

        def penalised(old: Any, stretch: Stretch) -> Any:
            return _penalised(old, stretch.own(self.penalty, old))

        return revised(scores, stretches(tokens, scores), penalised)


def _standing(rows: Rows, starts: tuple[int, ...], size: int) -> list[np.ndarray]:
    """Return per row the ids below `size` from `starts[r]` on, each once if they are remembered."""
    if remembers(rows):
        # At once: rows of one sequence, as drafts make them, share its memory.
        return [
            remembered(rows, r, Occurrences, start).below(size) for r, start in enumerate(starts)
        ]
    ids = rows.ids().numpy()
    parts = [ids[r, start : rows.lengths[r]] for r, start in enumerate(starts)]
    return parts if ids.size and ids.max() < size else [part[part < size] for part in parts]


@dataclass(frozen=True)
class EncoderRepetitionPenaltyLogitsProcessor(Overwriting):
    """Favours every id of the encoder's prompt: the penalty is taken as its reciprocal.

    `encoder_input_ids`: (B, S) ids, of which each row serves as many rows of scores as the others.
    """

    penalty: float
    encoder_input_ids: Any
    _found: dict[Any, list[Stretch]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    checked = (Argument("penalty", POSITIVE, "encoder_repetition_penalty"), _PROMPTS)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        key = (scores.shape, scores.device)
        if key not in self._found:
            prompts = [np.unique(np.array(ids, dtype=np.int64)) for ids in self.encoder_input_ids]
            inside = [ids[(ids >= 0) & (ids < scores.shape[1])] for ids in prompts]
            tokens = [inside[p] for p in _owners(len(scores), len(inside))]
            self._found[key] = list(stretches(tokens, scores))
        return revised(scores, self._found[key], lambda old, _: _penalised(old, 1 / self.penalty))


def _penalised(old: Any, penalty: Any) -> Any:
    """Return (C,) scores times the penalty where they are negative, else divided by it."""
    times, divided = old * penalty, old / penalty
    if isinstance(old, Tensor):
        return torch.where(old < 0, times, divided)
    if isinstance(penalty, np.ndarray) or not _SMALLEST < penalty < 1 / _SMALLEST:
        return np.where(old < 0, times, divided)
    # The same, without a branch per score: a penalty from 1 on lowers either way.
    return np.minimum(times, divided) if penalty >= 1 else np.maximum(times, divided)


_SMALLEST = 1e-30  # from here on neither product nor quotient of 0 or infinity is nan


@dataclass(frozen=True)
class NoRepeatNGramLogitsProcessor(Editing):
    """Bans every id that would complete an n-gram that the prefix already holds."""

    ngram_size: int

    checked = (Argument("ngram_size", SIZE, "no_repeat_ngram_size"),)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        if not remembers(rows):
            return banned(scores, *repeated_ngrams(rows, self.ngram_size))
        following = [remembered(rows, r, NGrams, self.ngram_size).next() for r in range(len(rows))]
        return _banned_each(scores, following)


@dataclass(frozen=True)
class EncoderNoRepeatNGramLogitsProcessor(Editing):
    """Bans every id that would complete an n-gram of the encoder's prompt.

    `encoder_input_ids`: (S,) or (B, S) ids, of which each row serves as many rows of scores as the
    others.
    """

    encoder_ngram_size: int
    encoder_input_ids: Any
    _known: list[NGrams] = field(default_factory=list, init=False, repr=False, compare=False)

    checked = (Argument("encoder_ngram_size", SIZE, "encoder_no_repeat_ngram_size"), _PROMPTS)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        grams = self._grams()
        ids, before = rows.table.data, self.encoder_ngram_size - 1
        ends = zip(rows.sequences, rows.lengths.tolist(), strict=True)
        tails = [ids[one.line, max(n - before, 0) : n].tolist() for one, n in ends]
        owners = _owners(len(rows), len(grams)).tolist()
        following = [grams[g].following(tuple(tail)) for g, tail in zip(owners, tails, strict=True)]
        return _banned_each(scores, following)

    def _grams(self) -> list[NGrams]:
        if not self._known:
            for prompt in self.encoder_input_ids:
                self._known.append(NGrams(self.encoder_ngram_size))
                self._known[-1].extend(list(prompt))
        return self._known


def _banned_each(scores: Tensor, following: list[tuple[int, ...]]) -> Edit | None:
    """Return -inf at the given ids of each row."""
    count = [len(part) for part in following]
    if not any(count):
        return None
    token = np.fromiter(chain.from_iterable(following), np.int64, sum(count))
    return banned(scores, np.repeat(np.arange(len(following)), count), token)


@dataclass(frozen=True)
class OccurrencePenalty(Overwriting):
    """Generated ids lose `presence` once and `frequency` per occurrence.

    `prompt`: whether those of the prompt do too; in calls by hand every id does. Negative values
    favour repetition. Source: `presence_penalty` and `frequency_penalty` of the OpenAI API, counted
    over generated ids as vLLM does.
    """

    presence: Numbers = 0.0
    frequency: Numbers = 0.0
    prompt: bool = False

    per_row = (
        Argument("presence", PENALTY, "presence_penalty"),
        Argument("frequency", PENALTY, "frequency_penalty"),
    )

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        asked = [sequence.request for sequence in rows.sequences]
        starts = [one.pad_prefix if self.prompt else one.prompt_visible for one in asked]
        size = scores.shape[-1]
        known = [_counted(rows, r, start, size) for r, start in enumerate(starts)]
        times = [counts for _, counts in known]

        def lowered(old: Any, stretch: Stretch) -> Any:
            count = alike(np.concatenate(times[stretch.rows]), old)
            each = stretch.own(self.frequency, old)
            return old - (each * count + stretch.own(self.presence, old))

        return revised(scores, stretches([tokens for tokens, _ in known], scores), lowered)


def _counted(rows: Rows, r: int, start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids below `size` that row r holds from `start` on, each once, and how often.

    These are copies.
    """
    memory = remembered(rows, r, Occurrences, start)
    inside = memory.tokens < size
    return memory.tokens[inside], memory.counts[inside]


_LARGEST = math.log(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Dry(Editing):
    """An id that would continue a match of n >= allowed_length ids of the prefix's end loses
    multiplier * base ** (n - allowed_length); the longest match of an id counts.

    No match reaches across an id of `breakers` or into the pad prefix, and none of them loses
    anything. Source: p-e-w 2024, text-generation-webui pull request 5677.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    breakers: tuple[int, ...] = ()

    checked = (
        Argument("multiplier", NOT_NEGATIVE, "dry_multiplier"),
        Argument("base", AT_LEAST_1, "dry_base"),
        Argument("allowed_length", SIZE, "dry_allowed_length"),
        Argument("breakers", ONE_OR_MORE_IDS, "dry_sequence_breakers"),
    )

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        ids = rows.ids().numpy()
        row, place, length = self._repeats(ids, rows)
        token = ids[row, place + 1]
        keep = length >= self.allowed_length
        keep &= ~np.isin(token, self.breakers) & (token < scores.shape[-1])
        if not keep.any():
            return None
        index, length = (row * scores.shape[-1] + token)[keep], length[keep]
        order = np.lexsort((length, index))
        index, length = index[order], length[order]
        last = np.append(index[1:] != index[:-1], True)  # of each place the longest match
        lost = self.multiplier * self.base ** (length[last] - self.allowed_length).astype(
            np.float64
        )
        at = on_device(scores.device, index[last])
        return Edit(
            at, scores.view(-1).index_select(0, at) - on_device(scores.device, lost, scores.dtype)
        )

    @property
    def _longest_counted(self) -> int:
        """The length of a match from which on the loss would leave the range of float32."""
        if self.base == 1 or self.multiplier == 0:
            return self.allowed_length
        room = (_LARGEST - math.log(self.multiplier)) / math.log(self.base)
        return self.allowed_length + max(int(room) - 1, 0)

    def _repeats(self, ids: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (C,) row, place and number of matching ids, for earlier places of a row's last id.

        There are none where that id is a breaker.
        """
        ends, every = rows.lengths - 1, np.arange(len(rows))
        starts = np.array([sequence.request.pad_prefix for sequence in rows.sequences])
        last = ids[every, np.maximum(ends, 0)] if ids.shape[1] else ends
        place = np.arange(ids.shape[1])
        before = (place >= starts[:, None]) & (place < ends[:, None])
        before &= ~np.isin(last, self.breakers)[:, None]
        row, at = np.nonzero(before & (ids == last[:, None]))
        length = np.ones(len(row), dtype=np.int64)
        going = np.arange(len(row))
        # Backwards, one id more at a time, with the places that still match.
        for n in range(1, self._longest_counted):
            going = going[at[going] - n >= starts[row[going]]]
            own = ids[row[going], ends[row[going]] - n]
            same = (ids[row[going], at[going] - n] == own) & ~np.isin(own, self.breakers)
            going = going[same]
            if not len(going):
                break
            length[going] += 1
        return row, at, length


def repeated_ngrams(rows: Rows, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, token) of every id that would complete an n-gram of its row."""
    ids, lengths = rows.ids().numpy(), rows.lengths
    windows = ids.shape[1] - size + 1
    if windows <= 0:
        none = np.empty(0, dtype=np.int64)
        return none, none
    match = np.arange(windows) + size <= lengths[:, None]
    for k in range(size - 1):
        # The last size - 1 ids of a row, which the next one would follow.
        tail = np.maximum(lengths - size + 1 + k, 0)[:, None]
        match &= ids[:, k : windows + k] == np.take_along_axis(ids, tail, axis=1)
    row, start = np.nonzero(match)
    return row, ids[row, start + size - 1]
