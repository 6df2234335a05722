"""The green-list watermark: ids of a list that the text itself seeds gain a bias.

The list is the reference's on the CPU whatever the device, so that a text marked on one machine is
recognised on another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.config.kinds import BETWEEN_0_AND_1, NUMBER, integer, one_of
from everystep.processors.base import LogitsProcessor
from everystep.processors.edits import Edit, places
from everystep.processors.green_list import green_bits, is_green, seed_of
from everystep.processors.stacking import admit
from everystep.types import Rows

_TABLE = 1_000_003
_CANDIDATES = 40


@dataclass(frozen=True)
class WatermarkLogitsProcessor(LogitsProcessor):
    """Green ids gain `bias`; the last `context_width` ids decide which are green.

    "lefthash": the last id seeds one list for all. "selfhash": each of the 40 best ids seeds its
    own list, with the ids before it. Prefixes shorter than `context_width` are not marked. Source:
    Kirchenbauer et al. 2023 (arXiv 2301.10226 and 2306.04634); WatermarkLogitsProcessor.
    """

    vocab_size: int
    device: Any = "cpu"
    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        admit(self, "vocab_size", integer(1))
        admit(self, "greenlist_ratio", BETWEEN_0_AND_1)
        admit(self, "bias", NUMBER)
        admit(self, "hashing_key", integer())
        admit(self, "seeding_scheme", one_of("lefthash", "selfhash"))
        admit(self, "context_width", integer(1))

    @property
    def greenlist_size(self) -> int:
        """How many ids are green."""
        return int(self.vocab_size * self.greenlist_ratio)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return self.overwrite(rows, scores.clone(memory_format=torch.contiguous_format))

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> the same, changed."""
        marked = np.flatnonzero(rows.lengths >= self.context_width)
        if not len(marked):
            return scores
        if self.seeding_scheme == "selfhash":
            return self._candidates(rows, scores, marked).written(scores)
        buffer = np.empty((-(-self.vocab_size // 8), 8), dtype=np.float32)
        green = torch.from_numpy(buffer).view(-1)[: self.vocab_size]
        for r in marked:
            last = int(rows.table.data[rows.sequences[r].line, rows.lengths[r] - 1])
            # Bits as numbers 0 and 1; a look-up per byte is faster than unpacking.
            np.take(_BYTES, self._bits(last), axis=0, out=buffer, mode="clip")
            scores[r, : self.vocab_size].add_(green.to(scores), alpha=self.bias)
        return scores

    def _bits(self, last: int) -> np.ndarray:
        seed = seed_of(self.hashing_key * last)
        return green_bits(self.vocab_size, self.greenlist_size, seed)

    def _candidates(self, rows: Rows, scores: Tensor, marked: np.ndarray) -> Edit:
        """The scores of those of the best ids that are green after their prefixes, raised."""
        at = torch.from_numpy(marked).to(scores.device)
        count = min(_CANDIDATES, scores.shape[-1])
        best = torch.topk(scores[at], count, dim=-1).indices.cpu().numpy()
        ids = [_tail(rows, int(r), self.context_width - 1) for r in marked]
        before = np.repeat(np.array(ids).reshape(len(marked), -1), count, axis=0)
        green = self.greens(np.concatenate([before, best.reshape(-1, 1)], axis=1))
        row, token = np.repeat(marked, count)[green], best.reshape(-1)[green]
        index = places(scores, row, token)
        return Edit(index, scores.view(-1)[index] + self.bias)

    def greens(self, ngrams: np.ndarray) -> np.ndarray:
        """(N,) whether the last id of each n-gram is green after those before it.

        `ngrams`: (N, n) ids; all n seed the list with "selfhash", the last but one with "lefthash".
        """
        if self.seeding_scheme == "selfhash":
            table = _table(self.hashing_key)
            hashed = table[ngrams % _TABLE] + 1
            seeds = (self.hashing_key * hashed * hashed[:, -1:]).min(axis=1).tolist()
        else:
            seeds = [self.hashing_key * int(token) for token in ngrams[:, -2]]
        size = (self.vocab_size, self.greenlist_size)
        pairs = zip(seeds, ngrams[:, -1].tolist(), strict=True)
        return np.array([is_green(*size, seed_of(seed), token) for seed, token in pairs], bool)


def _tail(rows: Rows, r: int, count: int) -> np.ndarray:
    """The last `count` ids of row r's prefix."""
    length = int(rows.lengths[r])
    return rows.table.data[rows.sequences[r].line, length - count : length]


@lru_cache(maxsize=4)
def _table(hashing_key: int) -> np.ndarray:
    """A fixed shuffle, through which ids are hashed."""
    generator = torch.Generator().manual_seed(hashing_key)
    shuffle: np.ndarray = torch.randperm(_TABLE, generator=generator).numpy()
    return shuffle


_BYTES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
