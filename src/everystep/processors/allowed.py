"""Processors that restrict or repair a row: tokens that a function allows, and finite scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.processors.base import LogitsProcessor
from everystep.types import Rows


@dataclass(frozen=True)
class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Only tokens that `prefix_allowed_tokens_fn(batch_id, ids)` returns may follow.

    A batch id counts searches of `num_beams` rows, from `first` on. Where everything allowed is
    -inf in all beams of a search already, the allowed tokens get 0. RequestError if nothing is
    allowed. Source: De Cao et al. 2021.
    """

    prefix_allowed_tokens_fn: Callable[[int, Tensor], Sequence[int]]
    num_beams: int
    first: int = field(default=0, kw_only=True)

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        mask = torch.full_like(scores, -math.inf)
        ids = rows.ids()
        for r, sequence in enumerate(rows.sequences):
            batch_id = self.first + sequence.index // self.num_beams
            mask[r, self._tokens(batch_id, ids[r, : rows.lengths[r]])] = 0
        constrained = scores + mask
        hopeless = constrained.amax(dim=-1).isneginf()
        if not bool(hopeless.any()):
            return constrained
        whole = self._all_beams(rows, hopeless.cpu().numpy())
        return torch.where(torch.from_numpy(whole)[:, None].to(scores.device), mask, constrained)

    def _tokens(self, batch_id: int, ids: Tensor) -> list[int]:
        tokens = list(self.prefix_allowed_tokens_fn(batch_id, ids))
        if not tokens:
            text = message(
                f"prefix_allowed_tokens_fn allows nothing for batch id {batch_id}",
                wanted="at least one token",
                got="none",
                do="Let it return the end token where a text is complete",
            )
            raise RequestError(text)
        return tokens

    def _all_beams(self, rows: Rows, hopeless: np.ndarray) -> np.ndarray:
        """(R,) whether every row of the same search at the same place is hopeless."""
        keys = [
            (id(sequence.request), sequence.index // self.num_beams, int(length))
            for sequence, length in zip(rows.sequences, rows.lengths, strict=True)
        ]
        hopeful = {key for key, lost in zip(keys, hopeless, strict=True) if not lost}
        return np.array([key not in hopeful for key in keys])


@dataclass(frozen=True)
class InfNanRemoveLogitsProcessor(LogitsProcessor):
    """nan becomes 0, and infinities the largest and smallest finite numbers."""

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """(R, V) -> (R, V)."""
        return torch.nan_to_num(scores, nan=0.0)
