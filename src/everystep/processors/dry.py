"""DRY: what would lengthen a repetition loses scores, the more the longer it already is.

Looks only at the ids of a prefix, so that it needs no memory; it reads them once per step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import AT_LEAST_1, NOT_NEGATIVE, integer
from everystep.processors.base import LogitsProcessor
from everystep.processors.edits import Edit, places
from everystep.processors.stacking import admit, admit_ids
from everystep.types import Rows

_LARGEST = math.log(torch.finfo(torch.float32).max)


class _Repeats(NamedTuple):
    """Where a row's last id stood before: the row, the place, and how many ids match there."""

    row: np.ndarray
    place: np.ndarray
    length: np.ndarray


@dataclass(frozen=True)
class Dry(LogitsProcessor):
    """An id that would continue a match of n >= allowed_length ids of the prefix's end loses
    multiplier * base ** (n - allowed_length); the longest match of an id counts.

    No match reaches across an id of `breakers` or into the pad prefix, and none of them loses
    anything. Source: p-e-w 2024, text-generation-webui pull request 5677.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    breakers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        admit(self, "multiplier", NOT_NEGATIVE, "dry_multiplier")
        admit(self, "base", AT_LEAST_1, "dry_base")
        admit(self, "allowed_length", integer(1), "dry_allowed_length")
        admit_ids(self, "breakers", "dry_sequence_breakers")

    def edit(self, rows: Rows, scores: Tensor) -> Edit | None:
        """The scores of ids that would continue a repetition, lowered."""
        ids = rows.ids().numpy()
        found = self._repeats(ids, rows)
        keep = found.length >= self.allowed_length
        row, length = found.row[keep], found.length[keep]
        token = ids[row, found.place[keep] + 1]
        allowed = ~np.isin(token, self.breakers) & (token < scores.shape[-1])
        row, token, length = _longest(row[allowed], token[allowed], length[allowed])
        if not len(row):
            return None
        lost = self.multiplier * self.base ** (length - self.allowed_length).astype(np.float64)
        index = places(scores, row, token)
        return Edit(index, scores.view(-1)[index] - torch.from_numpy(lost).to(scores))

    @property
    def _longest_counted(self) -> int:
        """The length of a match from which on the loss would leave the range of float32."""
        if self.base == 1 or self.multiplier == 0:
            return self.allowed_length
        room = (_LARGEST - math.log(self.multiplier)) / math.log(self.base)
        return self.allowed_length + max(int(room) - 1, 0)

    def _repeats(self, ids: np.ndarray, rows: Rows) -> _Repeats:
        """Every earlier place of each row's last id, unless that is a breaker."""
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
        return _Repeats(row, at, length)


def _longest(
    row: np.ndarray, token: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each (row, token) once, with the greatest of its lengths."""
    order = np.lexsort((-length, token, row))
    row, token, length = row[order], token[order], length[order]
    first = np.ones(len(row), dtype=bool)
    first[1:] = (row[1:] != row[:-1]) | (token[1:] != token[:-1])
    return row[first], token[first], length[first]
