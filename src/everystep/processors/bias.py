"""Processors that add to the last id of a sequence when the ids before it stand at the end.

A ban is a bias of -inf. The table of biases is turned into arrays once per width and device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.processors.matching import matching_tails
from everystep.processors.stacking import require
from everystep.types import Rows

Table = tuple[tuple[tuple[int, ...], float], ...]


@dataclass(frozen=True)
class _Group:
    """Words of one length: the ids before the last (W, n), the last (W,), the bias (W,)."""

    before: np.ndarray
    last: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class _Prepared:
    """`single`: (V,) biases of single ids. `groups`: longer words by length, in first order."""

    single: Tensor
    groups: tuple[_Group, ...]


def _prepare(table: Table, size: int, device: torch.device, name: str) -> _Prepared:
    check_width(table, size, name)
    single = torch.zeros(size, dtype=torch.float32, device=device)
    by_length: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in table:
        by_length.setdefault(len(ids), []).append((ids, bias))
    for ids, bias in by_length.pop(1, []):
        single[ids[0]] = bias
    groups = (
        _Group(
            np.array([ids[:-1] for ids, _ in words], dtype=np.int64),
            np.array([ids[-1] for ids, _ in words], dtype=np.int64),
            np.array([bias for _, bias in words], dtype=np.float32),
        )
        for words in by_length.values()
    )
    return _Prepared(single, tuple(groups))


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


def _biased(prepared: _Prepared, rows: Rows, scores: Tensor) -> Tensor:
    """Scores plus the sum of all biases that apply; one rounding, as in the reference."""
    bias = prepared.single.to(scores.dtype).expand_as(scores)
    ids = rows.ids().numpy()
    for group in prepared.groups:
        row, word = matching_tails(ids, rows.lengths, group.before)
        if len(row):
            place = tuple(torch.from_numpy(i).to(scores.device) for i in (row, group.last[word]))
            added = torch.from_numpy(group.bias[word]).to(scores)
            bias = bias.index_put(place, added, accumulate=True)
    return scores + bias


@dataclass(frozen=True)
class SequenceBias:
    """Adds `bias` to an id where it would complete its sequence of ids; all that apply add up.

    `table`: ((ids, bias), ...). Source: SequenceBiasLogitsProcessor.
    """

    table: Table
    _prepared: dict[Any, _Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        wanted = "a non-empty table of id sequences and biases"
        require(
            len(self.table) > 0 and all(ids for ids, _ in self.table),
            "sequence_bias",
            wanted,
            self.table,
        )

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        key = (scores.shape[-1], scores.device)
        if key not in self._prepared:
            self._prepared[key] = _prepare(self.table, *key, "sequence_bias")
        return _biased(self._prepared[key], rows, scores)


@dataclass(frozen=True)
class NoBadWords:
    """Bans every id that would complete one of the words. Source: NoBadWordsLogitsProcessor."""

    words: tuple[tuple[int, ...], ...]
    _prepared: dict[Any, _Prepared] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        require(all(self.words), "bad_words_ids", "non-empty lists of token ids", self.words)

    @property
    def table(self) -> Table:
        """The words as biases, each once."""
        return tuple((word, -math.inf) for word in dict.fromkeys(self.words))

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        key = (scores.shape[-1], scores.device)
        if key not in self._prepared:
            self._prepared[key] = _prepare(self.table, *key, "bad_words_ids")
        return _biased(self._prepared[key], rows, scores)
