"""Processors that depend on how long the prefix is: when it may end, must end, must begin.

Lengths count visible ids, pad prefix included. A prompt's length that is None is each row's own.
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import COUNT, DECAY, ONE_OR_MORE_IDS
from everystep.devices import on_device
from everystep.processors.base import Editing, Narrowing
from everystep.processors.best import is_wide
from everystep.processors.edits import Edit, banned_in, forced_in, places
from everystep.processors.stacking import Argument, Counts, Numbers
from everystep.types import Rows, Scores

_ENDS = Argument("eos_token_id", ONE_OR_MORE_IDS)


@dataclass(frozen=True)
class MinLengthLogitsProcessor(Editing):
    """No end token before the prefix holds `min_length` ids."""

    min_length: Counts
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    per_row = (Argument("min_length", COUNT),)
    checked = (_ENDS,)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        return banned_in(scores, rows.lengths < np.asarray(self.min_length), self.eos_token_id)


@dataclass(frozen=True)
class MinNewTokensLengthLogitsProcessor(Editing):
    """No end token before `min_new_tokens` ids follow the prompt."""

    prompt_length_to_skip: int | None
    min_new_tokens: Counts
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    per_row = (Argument("min_new_tokens", COUNT),)
    checked = (Argument("prompt_length_to_skip", COUNT, optional=True), _ENDS)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        new = _generated(rows, self.prompt_length_to_skip)
        return banned_in(scores, new < np.asarray(self.min_new_tokens), self.eos_token_id)


@dataclass(frozen=True)
class ForcedBOSTokenLogitsProcessor(Editing, Narrowing):
    """Only `bos_token_id` may follow a prefix of one id."""

    bos_token_id: int

    keeps_lists = False  # only where rows begin

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        return forced_in(scores, rows.lengths == 1, (self.bos_token_id,))

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """Return the one token, where all rows begin."""
        return _forced(scores, rows.lengths == 1, (self.bos_token_id,))


@dataclass(frozen=True)
class ForcedEOSTokenLogitsProcessor(Editing, Narrowing):
    """Only end tokens may stand at the last place of `max_length`."""

    max_length: int
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    checked = (
        Argument("max_length", COUNT),
        Argument("eos_token_id", ONE_OR_MORE_IDS, "forced_eos_token_id"),
    )
    keeps_lists = False  # only at the last place

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        return forced_in(scores, rows.lengths == self.max_length - 1, self.eos_token_id)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """Return the end tokens, where all rows are at the last place."""
        return _forced(scores, rows.lengths == self.max_length - 1, self.eos_token_id)


@dataclass(frozen=True)
class ExponentialDecayLengthPenalty(Editing):
    """From (start, factor): ending gains |score| * (factor^n - 1) at the n-th id after the start.

    The start counts from `input_ids_seq_length`, the prompt's length.
    """

    exponential_decay_length_penalty: tuple[int, float]
    eos_token_id: Any
    input_ids_seq_length: int | None

    checked = (
        Argument("exponential_decay_length_penalty", DECAY),
        _ENDS,
        Argument("input_ids_seq_length", COUNT, optional=True),
    )

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        start, factor = self.exponential_decay_length_penalty
        beyond = _generated(rows, self.input_ids_seq_length) - start
        late = np.flatnonzero(beyond > 0)
        ends = [token for token in dict.fromkeys(self.eos_token_id) if token < scores.shape[-1]]
        if not len(late) or not ends:
            return None
        index = places(scores, np.repeat(late, len(ends)), np.tile(ends, len(late)))
        gains = np.repeat([_gain(factor, int(n)) for n in beyond[late]], len(ends))
        ending = scores.view(-1).index_select(0, index)
        gained = torch.abs(ending) * on_device(scores.device, gains, scores.dtype)
        return Edit(index, ending + gained.masked_fill(~torch.isfinite(ending), 0.0))


@dataclass(frozen=True)
class SuppressTokensLogitsProcessor(Editing):
    """The tokens are never chosen."""

    suppress_tokens: Any
    device: InitVar[str] = "cpu"

    checked = (Argument("suppress_tokens", ONE_OR_MORE_IDS),)
    reads_ids = False

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        return banned_in(scores, np.ones(len(scores), dtype=bool), self.suppress_tokens)


@dataclass(frozen=True)
class SuppressTokensAtBeginLogitsProcessor(Editing):
    """The tokens are not chosen where the prefix holds `begin_index` ids.

    Where that is None, it is where `after` ids follow the row's own prompt.
    """

    begin_suppress_tokens: Any
    begin_index: int | None
    device: InitVar[str] = "cpu"
    after: int = field(default=0, kw_only=True)

    checked = (
        Argument("begin_suppress_tokens", ONE_OR_MORE_IDS),
        Argument("begin_index", COUNT, optional=True),
    )

    def set_begin_index(self, begin_index: int) -> None:
        """Suppress the tokens at that length of the prefix from now on."""
        object.__setattr__(self, "begin_index", begin_index)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        given = self.begin_index is not None
        begins = _generated(rows, self.begin_index) == (0 if given else self.after)
        return banned_in(scores, begins, self.begin_suppress_tokens)


def _gain(factor: float, n: int) -> float:
    try:
        return float(factor**n) - 1
    except OverflowError:
        return math.inf


def _forced(scores: Scores, which: np.ndarray, tokens: tuple[int, ...]) -> Scores | None:
    """Return `forced_in` as lists, where it holds in every row of wide scores."""
    if not which.all() or not (scores.tokens is not None or is_wide(scores.values)):
        return None
    ids = [token for token in sorted(set(tokens)) if 0 <= token < scores.vocabulary]
    if not ids:
        return None
    rows = len(scores)
    zeros = scores.values.new_zeros(rows, len(ids))
    return Scores(zeros, torch.tensor(ids).repeat(rows, 1), scores.vocabulary)


def _generated(rows: Rows, prompt_length: int | None) -> np.ndarray:
    """Return (R,) how many ids of each row follow its prompt."""
    if prompt_length is not None:
        return rows.lengths - prompt_length
    prompts = (sequence.request.prompt_visible for sequence in rows.sequences)
    return rows.lengths - np.fromiter(prompts, np.int64, len(rows))
