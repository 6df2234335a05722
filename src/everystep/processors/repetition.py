"""Processors against repetition: what stands in the prefix, or in the prompt of the encoder.

Pad ids of the prefix count as the reference counts them: not for penalties, but for n-grams. Ids
beyond the width of the scores can never be chosen and are passed over. What stands in a prefix is
remembered where rows go on, and read off its ids where they are given by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import POSITIVE, integer, plain
from everystep.processors.base import LogitsProcessor, remembers
from everystep.processors.edits import Edit, Revision, Stretch, banned, stretches
from everystep.processors.matching import repeated_ngrams
from everystep.processors.memory import NGrams, ngrams, occurrences
from everystep.processors.stacking import Counts, Numbers, admit
from everystep.types import Rows

_SIZE = integer(1)


@dataclass(frozen=True)
class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Penalises every id that stands in the prefix (Keskar et al. 2019).

    `prompt_ignore_length`: how many ids at the start do not count; None: each row's pad prefix.
    """

    penalty: Numbers
    prompt_ignore_length: Counts | None = None

    per_row = ("penalty", "prompt_ignore_length")

    def __post_init__(self) -> None:
        admit(self, "penalty", POSITIVE, "repetition_penalty")
        if self.prompt_ignore_length is not None:
            admit(self, "prompt_ignore_length", integer(0))

    def edit(self, rows: Rows, scores: Tensor) -> Revision:
        """The scores of ids that stand in the prefix, penalised."""
        tokens = _standing(rows, self._starts(rows), scores.shape[-1])
        return Revision(stretches(tokens, scores), self._revised)

    def _revised(self, old: Any, stretch: Stretch) -> Any:
        return _penalised(old, stretch.own(self.penalty, old))

    def _starts(self, rows: Rows) -> list[int]:
        """Per row, how many ids at its start do not count."""
        ignored = self.prompt_ignore_length
        if ignored is None:
            return [sequence.request.pad_prefix for sequence in rows.sequences]
        return list(ignored) if isinstance(ignored, tuple) else [ignored] * len(rows)


def _standing(rows: Rows, starts: list[int], size: int) -> list[np.ndarray]:
    """Per row, the ids below `size` from `starts[r]` on: each once where they are remembered."""
    if remembers(rows):
        # At once: rows of one sequence, as drafts make them, share its memory.
        return [occurrences(rows, r, start).below(size) for r, start in enumerate(starts)]
    ids = rows.ids().numpy()
    parts = [ids[r, start : rows.lengths[r]] for r, start in enumerate(starts)]
    return parts if ids.size and ids.max() < size else [part[part < size] for part in parts]


@dataclass(frozen=True)
class EncoderRepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Favours every id of the encoder's prompt: the penalty is taken as its reciprocal.

    `encoder_input_ids`: (B, S) ids, of which each row serves as many rows of scores as the others.
    """

    penalty: float
    encoder_input_ids: Any
    _found: dict[Any, list[Stretch]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        admit(self, "penalty", POSITIVE, "encoder_repetition_penalty")
        object.__setattr__(self, "encoder_input_ids", _prompts(self.encoder_input_ids))

    def edit(self, rows: Rows, scores: Tensor) -> Revision:
        """The scores of ids that stand in the encoder's prompt, raised."""
        key = (scores.shape, scores.device)
        if key not in self._found:
            self._found[key] = list(stretches(self._tokens(*scores.shape), scores))
        return Revision(self._found[key], self._revised)

    def _revised(self, old: Any, stretch: Stretch) -> Any:
        return _penalised(old, 1 / self.penalty)

    def _tokens(self, rows: int, size: int) -> list[np.ndarray]:
        """Per row the ids of its prompt that are below `size`, each once."""
        prompts = [np.unique(np.array(ids, dtype=np.int64)) for ids in self.encoder_input_ids]
        inside = [ids[(ids >= 0) & (ids < size)] for ids in prompts]
        return [inside[p] for p in _owners(rows, len(inside))]


def _penalised(old: Any, penalty: Any) -> Any:
    """(C,) scores times the penalty where they are negative, else divided by it."""
    times, divided = old * penalty, old / penalty
    if isinstance(old, Tensor):
        return torch.where(old < 0, times, divided)
    if isinstance(penalty, np.ndarray) or not _SMALLEST < penalty < 1 / _SMALLEST:
        return np.where(old < 0, times, divided)
    # The same, without a branch per score: a penalty from 1 on lowers either way.
    return np.minimum(times, divided) if penalty >= 1 else np.maximum(times, divided)


_SMALLEST = 1e-30  # from here on neither product nor quotient of 0 or infinity is nan


@dataclass(frozen=True)
class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Bans every id that would complete an n-gram that the prefix already holds."""

    ngram_size: int

    def __post_init__(self) -> None:
        admit(self, "ngram_size", _SIZE, "no_repeat_ngram_size")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the ids that would complete one."""
        if not remembers(rows):
            return banned(scores, *repeated_ngrams(rows, self.ngram_size))
        return _banned_each(
            scores, [ngrams(rows, r, self.ngram_size).next() for r in range(len(rows))]
        )


@dataclass(frozen=True)
class EncoderNoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Bans every id that would complete an n-gram of the encoder's prompt.

    `encoder_input_ids`: (S,) or (B, S) ids, of which each row serves as many rows of scores as the
    others.
    """

    encoder_ngram_size: int
    encoder_input_ids: Any
    _known: list[NGrams] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        admit(self, "encoder_ngram_size", _SIZE, "encoder_no_repeat_ngram_size")
        object.__setattr__(self, "encoder_input_ids", _prompts(self.encoder_input_ids))

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the ids that would complete one."""
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
    """-inf at the given ids of each row."""
    count = [len(part) for part in following]
    if not any(count):
        return None
    token = np.fromiter(chain.from_iterable(following), np.int64, sum(count))
    return banned(scores, np.repeat(np.arange(len(following)), count), token)


def _prompts(given: Any) -> tuple[tuple[int, ...], ...]:
    """(S,) or (B, S) ids as a tuple per prompt."""
    value = plain(given)
    nested = value if value and isinstance(value[0], list | tuple) else [value]
    return tuple(tuple(map(int, row)) for row in nested)


def _owners(rows: int, prompts: int) -> np.ndarray:
    """(R,) whose prompt each row has: as many rows of one after another for every prompt."""
    return np.arange(rows) // max(rows // prompts, 1)
