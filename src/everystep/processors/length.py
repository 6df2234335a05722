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

from everystep.config.kinds import DECAY, integer, is_integer, plain
from everystep.processors.base import LogitsProcessor
from everystep.processors.best import is_wide
from everystep.processors.edits import Edit, banned_in, places
from everystep.processors.stacking import Counts, Numbers, admit, admit_ids, require
from everystep.types import Rows, Scores

COUNT = integer(0)


@dataclass(frozen=True)
class MinLengthLogitsProcessor(LogitsProcessor):
    """No end token before the prefix holds `min_length` ids."""

    min_length: Counts
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    per_row = ("min_length",)

    def __post_init__(self, device: str) -> None:
        admit(self, "min_length", COUNT)
        admit_ids(self, "eos_token_id")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the end tokens of short rows."""
        return banned_in(scores, rows.lengths < np.asarray(self.min_length), self.eos_token_id)


@dataclass(frozen=True)
class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """No end token before `min_new_tokens` ids follow the prompt."""

    prompt_length_to_skip: int | None
    min_new_tokens: Counts
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    per_row = ("min_new_tokens",)

    def __post_init__(self, device: str) -> None:
        _admit_prompt_length(self.prompt_length_to_skip, "prompt_length_to_skip")
        admit(self, "min_new_tokens", COUNT)
        admit_ids(self, "eos_token_id")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the end tokens of rows with few new ids."""
        new = _generated(rows, self.prompt_length_to_skip)
        return banned_in(scores, new < np.asarray(self.min_new_tokens), self.eos_token_id)


@dataclass(frozen=True)
class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Only `bos_token_id` may follow a prefix of one id."""

    bos_token_id: int

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return _only(scores, rows.lengths == 1, (self.bos_token_id,))

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        return _only(scores, rows.lengths == 1, (self.bos_token_id,), owned=True)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """The one token, where all rows begin."""
        return _forced(scores, rows.lengths == 1, (self.bos_token_id,))


@dataclass(frozen=True)
class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Only end tokens may stand at the last place of `max_length`."""

    max_length: int
    eos_token_id: Any
    device: InitVar[str] = "cpu"

    def __post_init__(self, device: str) -> None:
        admit_ids(self, "eos_token_id", "forced_eos_token_id")

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return _only(scores, rows.lengths == self.max_length - 1, self.eos_token_id)

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        return _only(scores, rows.lengths == self.max_length - 1, self.eos_token_id, owned=True)

    def few(self, rows: Rows, scores: Scores, temperature: Numbers = 1.0) -> Scores | None:
        """The end tokens, where all rows are at the last place."""
        return _forced(scores, rows.lengths == self.max_length - 1, self.eos_token_id)


@dataclass(frozen=True)
class ExponentialDecayLengthPenalty(LogitsProcessor):
    """From (start, factor): ending gains |score| * (factor^n - 1) at the n-th id after the start.

    The start counts from `input_ids_seq_length`, the prompt's length.
    """

    exponential_decay_length_penalty: tuple[int, float]
    eos_token_id: Any
    input_ids_seq_length: int | None

    def __post_init__(self) -> None:
        admit(self, "exponential_decay_length_penalty", DECAY)
        admit_ids(self, "eos_token_id")
        _admit_prompt_length(self.input_ids_seq_length, "input_ids_seq_length")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """The end tokens of long rows, raised."""
        start, factor = self.exponential_decay_length_penalty
        beyond = _generated(rows, self.input_ids_seq_length) - start
        late = np.flatnonzero(beyond > 0)
        ends = [token for token in dict.fromkeys(self.eos_token_id) if token < scores.shape[-1]]
        if not len(late) or not ends:
            return None
        index = places(scores, np.repeat(late, len(ends)), np.tile(ends, len(late)))
        gains = np.repeat([_gain(factor, int(n)) for n in beyond[late]], len(ends))
        ending = scores.view(-1).index_select(0, index)
        gained = torch.abs(ending) * torch.from_numpy(gains).to(scores)
        return Edit(index, ending + gained.masked_fill(~torch.isfinite(ending), 0.0))


@dataclass(frozen=True)
class SuppressTokensLogitsProcessor(LogitsProcessor):
    """The tokens are never chosen."""

    suppress_tokens: Any
    device: InitVar[str] = "cpu"

    def __post_init__(self, device: str) -> None:
        admit_ids(self, "suppress_tokens")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the tokens of all rows."""
        return banned_in(scores, np.ones(len(scores), dtype=bool), self.suppress_tokens)


@dataclass(frozen=True)
class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """The tokens are not chosen where the prefix holds `begin_index` ids.

    Where that is None, it is where `after` ids follow the row's own prompt.
    """

    begin_suppress_tokens: Any
    begin_index: int | None
    device: InitVar[str] = "cpu"
    after: int = field(default=0, kw_only=True)

    def __post_init__(self, device: str) -> None:
        admit_ids(self, "begin_suppress_tokens")
        _admit_prompt_length(self.begin_index, "begin_index")

    def set_begin_index(self, begin_index: int) -> None:
        """From now on the tokens are suppressed at that length of the prefix."""
        object.__setattr__(self, "begin_index", begin_index)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the tokens of rows that begin."""
        given = self.begin_index is not None
        begins = _generated(rows, self.begin_index) == (0 if given else self.after)
        return banned_in(scores, begins, self.begin_suppress_tokens)


def _gain(factor: float, n: int) -> float:
    try:
        return float(factor**n) - 1
    except OverflowError:
        return math.inf


def _only(
    scores: Tensor, which: np.ndarray, tokens: tuple[int, ...], *, owned: bool = False
) -> Tensor:
    """Scores with 0 at the tokens and -inf elsewhere, in the rows where `which` holds."""
    if not which.any():
        return scores
    result = scores if owned else scores.clone(memory_format=torch.contiguous_format)
    if which.all():
        result.fill_(-math.inf)
    else:
        result.index_fill_(0, torch.from_numpy(np.flatnonzero(which)).to(scores.device), -math.inf)
    edit = banned_in(result, which, tokens)
    return result if edit is None else Edit(edit.index, 0.0).written(result)


def _forced(scores: Scores, which: np.ndarray, tokens: tuple[int, ...]) -> Scores | None:
    """As `_only`, as lists, where it holds in every row of wide scores."""
    if not which.all() or not (scores.tokens is not None or is_wide(scores.values)):
        return None
    ids = [token for token in sorted(set(tokens)) if 0 <= token < scores.vocabulary]
    if not ids:
        return None
    rows = len(scores)
    zeros = scores.values.new_zeros(rows, len(ids))
    return Scores(zeros, torch.tensor(ids).repeat(rows, 1), scores.vocabulary)


def _generated(rows: Rows, prompt_length: int | None) -> np.ndarray:
    """(R,) how many ids of each row follow its prompt."""
    if prompt_length is not None:
        return rows.lengths - prompt_length
    prompts = (sequence.request.prompt_visible for sequence in rows.sequences)
    return rows.lengths - np.fromiter(prompts, np.int64, len(rows))


def _admit_prompt_length(value: Any, name: str) -> None:
    value = plain(value)
    counts = value is None or (is_integer(value) and value >= 0)
    require(counts, name, COUNT.wanted, value)
