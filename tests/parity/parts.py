"""What a caller may bring of his own: processors, criteria, a function of allowed tokens.

They are written against transformers' contract alone: a rectangle of ids, one row per sequence,
and a rectangle of scores. Both sides get objects of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class DependsOnLength:
    """Lowers every third token, which third by the length of the row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        lowered = torch.arange(scores.shape[1]) % 3 == input_ids.shape[1] % 3
        return torch.where(lowered, scores - 1.5, scores)


class DependsOnRow:
    """Raises another token in every row of the rectangle."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = torch.arange(scores.shape[0])
        raised = torch.zeros_like(scores)
        raised[rows, (5 * rows) % scores.shape[1]] = 1.0
        return scores + raised


class WritesInPlace:
    """Changes the scores that it was given, and returns them."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::4] -= 0.75
        return scores


class Writes:
    """Changes a copy of the scores as WritesInPlace does."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return WritesInPlace()(input_ids, scores.clone())


class ForbidsRepeats:
    """Never the last token again."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class Remembers:
    """Lowers tokens more with every call: it has a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        lowered = scores.clone()
        lowered[:, self.calls % scores.shape[1]] -= 0.1 * self.calls
        return lowered


class StopsOnSeventh:
    """Ends rows whose last token is a multiple of seven."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids[:, -1] % 7 == 0


class StopsOnSum:
    """Ends rows by all of their ids."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.sum(1) % 11 == 0


class StopsOnBest:
    """Ends all rows by what was best in the first row of the newest scores, where it gets them."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        best = None if scores is None else int(scores[-1][0].argmax())
        ends = best is not None and (best + len(scores)) % 5 == 0
        return torch.full((len(input_ids),), ends)


PROCESSORS: Mapping[str, type] = {
    kind.__name__: kind
    for kind in (DependsOnLength, DependsOnRow, WritesInPlace, Writes, ForbidsRepeats, Remembers)
}
CRITERIA: Mapping[str, type] = {
    kind.__name__: kind for kind in (StopsOnSeventh, StopsOnSum, StopsOnBest)
}


def allowed_tokens(vocabulary: int) -> Callable[[int, Tensor], list[int]]:
    """Half of the vocabulary, by the last token and by which prompt it is."""

    def allowed(batch: int, ids: Tensor) -> list[int]:
        parity = (int(ids[-1]) + batch) % 2
        return [token for token in range(vocabulary) if token % 2 == parity]

    return allowed


def only(ids: Tensor) -> Callable[[int, Tensor], list[int]]:
    """The next token of each prompt, (batch, width), and no other."""
    return lambda batch, seen: [int(ids[batch, len(seen)])]
