"""Processors that add to the last id of a sequence when the ids before it stand at the end.

A ban is a bias of -inf. The table of biases is turned into arrays once per width and device; a step
touches only the ids that some word of the table ends in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import BIASES, WORDS
from everystep.errors import RequestError, message
from everystep.processors.base import LogitsProcessor
from everystep.processors.edits import Edit
from everystep.processors.matching import matching_tails
from everystep.processors.stacking import admit, admit_ids
from everystep.types import Rows

Table = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True)
class _Group:
    """Words of one length: the ids before the last (W, n), the place of the last one among all last
    ids (W,), the bias (W,)."""

    before: np.ndarray
    last: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class _Prepared:
    """`ends`: (C,) the ids that words end in. `single`: (C,) float32 biases of words of one id.
    `groups`: longer words by length, in first order."""

    ends: Tensor
    single: Tensor
    groups: tuple[_Group, ...]

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """Scores plus the sum of all biases that apply; one rounding, as in the reference."""
        if not len(self.ends):
            return None
        size = scores.shape[-1]
        bias = self.single.to(scores.dtype).repeat(len(scores), 1)
        for group in self.groups:
            row, word = matching_tails(rows, group.before)
            if len(row):
                place = tuple(
                    torch.from_numpy(i).to(scores.device) for i in (row, group.last[word])
                )
                added = torch.from_numpy(group.bias[word]).to(scores)
                bias.index_put_(place, added, accumulate=True)
        first = torch.arange(0, len(scores) * size, size, device=scores.device)
        index = (first[:, None] + self.ends).view(-1)
        return Edit(index, scores.view(-1).index_select(0, index) + bias.view(-1))


def _prepare(table: Table, size: int, device: torch.device, name: str) -> _Prepared:
    check_width(table, size, name)
    ends = list(dict.fromkeys(ids[-1] for ids, _ in table))
    place = {token: i for i, token in enumerate(ends)}
    single = torch.zeros(len(ends), dtype=torch.float32)
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in table:
        by_length.setdefault(len(ids), []).append((ids, bias))
    for ids, bias in by_length.pop(1, []):
        single[place[ids[0]]] = bias
    groups = (
        _Group(
            np.array([ids[:-1] for ids, _ in words], dtype=np.int64),
            np.array([place[ids[-1]] for ids, _ in words], dtype=np.int64),
            np.array([bias for _, bias in words], dtype=np.float32),
        )
        for words in by_length.values()
    )
    return _Prepared(
        torch.tensor(ends, dtype=torch.int64, device=device), single.to(device), tuple(groups)
    )


def check_width(table: Table, size: int, name: str) -> None:
    """RequestError if a word of the table has an id that no score belongs to."""
    beyond = sorted({token for ids, _ in table for token in ids if token >= size})
    if beyond:
        text = message(
            f"{name} names ids beyond the vocabulary",
            wanted=f"ids below {size}",
            got=beyond,
            do="Use ids of this model's tokenizer",
        )
        raise RequestError(text)


@dataclass(frozen=True)
class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to an id where it would complete its sequence of ids; all that apply add up.

    `sequence_bias`: {(id, ...): bias} or [[[id, ...], bias], ...].
    """

    sequence_bias: Any
    _prepared: dict[Any, _Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        admit(self, "sequence_bias", BIASES)
        object.__setattr__(self, "sequence_bias", tuple(self.sequence_bias.items()))

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """The last ids of all sequences, raised or lowered."""
        key = (scores.shape[-1], scores.device)
        if key not in self._prepared:
            self._prepared[key] = _prepare(self.sequence_bias, *key, "sequence_bias")
        return self._prepared[key].edit(rows, scores)


@dataclass(frozen=True)
class NoBadWordsLogitsProcessor(LogitsProcessor):
    """Bans every id that would complete one of the words, a word of one end token left out."""

    bad_words_ids: Any
    eos_token_id: Any = None
    _prepared: dict[Any, _Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        admit(self, "bad_words_ids", WORDS)
        words = dict.fromkeys(tuple(map(int, word)) for word in self.bad_words_ids)
        object.__setattr__(self, "bad_words_ids", tuple(words))
        if self.eos_token_id is not None:
            admit_ids(self, "eos_token_id")

    @property
    def table(self) -> Table:
        """The words as biases, each once."""
        ends = {(token,) for token in self.eos_token_id or ()}
        return tuple((word, -math.inf) for word in self.bad_words_ids if word not in ends)

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """-inf at the last ids of words whose beginning stands at the end."""
        key = (scores.shape[-1], scores.device)
        if key not in self._prepared:
            self._prepared[key] = _prepare(self.table, *key, "bad_words_ids")
        return self._prepared[key].edit(rows, scores)
