"""The caller's own processors as processors of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everystep.errors import RequestError, message
from everystep.types import Rows


@dataclass(frozen=True, eq=False)
class User:
    """Calls a function of (input_ids, scores), or of (rows, scores) with `takes_rows`.

    Rows of equal length are given as one rectangle, others one by one without padding. Two are
    equal if they call the same object. RequestError if it returns another shape.
    """

    call: Callable[..., Tensor]
    takes_rows: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, User) and self.call is other.call

    def __hash__(self) -> int:
        return id(self.call)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        # What is called may change its argument in place; ours stays as it is.
        if self.takes_rows:
            return self._checked(self.call(rows, scores.clone()), scores)
        ids, lengths = rows.ids().to(scores.device), rows.lengths
        if len(rows) and np.all(lengths == lengths[0]):
            return self._checked(self.call(ids.clone(), scores.clone()), scores)
        parts = [
            self._checked(self.call(ids[r : r + 1, :n].clone(), one.clone()), one)
            for r, (n, one) in enumerate(zip(lengths, scores[:, None], strict=True))
        ]
        return torch.cat(parts) if parts else scores

    def _checked(self, result: Any, scores: Tensor) -> Tensor:
        if isinstance(result, Tensor) and result.shape == scores.shape:
            return result
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        text = message(
            f"logits processor {self.call!r} returned something else than scores",
            wanted=f"a tensor of shape {tuple(scores.shape)}",
            got=got,
            do="Let it return the scores, changed or not",
        )
        raise RequestError(text)
