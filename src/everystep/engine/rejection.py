"""Drafts that are accepted by chance, or against a mixture: see `Verification`.

The strategy learns nothing of it: where a guess is accepted, it is shown that token alone, and
where one is rejected, what is left of the distribution; from both it chooses as it always does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from everystep.devices import on_device
from everystep.types import Request, Scores
from everystep.types.request import Batch, places_of

Drafted = tuple[Request, int, np.ndarray, Tensor | None]
"""A request, the first row of one of its sequences, its draft, and what that was drawn from."""


def judged(scores: Scores, batch: Batch, drafted: list[Drafted]) -> Scores:
    """Scores of R rows -> those to choose from, where requests ask for more than a match."""
    verified = [one for one in drafted if one[0].verification.reads and len(one[2])]
    if not verified:
        return scores
    values = scores.whole().values.clone()
    numbers = _numbers(batch, verified)
    for request, first, ids, scored in verified:
        rows = values[first : first + len(ids)]
        guesses = on_device(values.device, ids)
        p, q = rows.softmax(dim=-1), _drawn_from(scored, guesses, rows)
        weight = request.verification.weight
        if request.verification.rejects:
            _reject(rows, guesses, p, q, next(numbers), weight)
        else:
            rows.copy_((weight * p + (1 - weight) * q).log())
    return Scores.of(values)


def _reject(
    rows: Tensor, guesses: Tensor, p: Tensor, q: Tensor, numbers: Tensor, weight: float
) -> None:
    """The rows (n, V) show accepted guesses, and after them what is left where one is rejected."""
    at = guesses[:, None]
    ratio = (p.gather(1, at) / q.gather(1, at))[:, 0].cpu()
    ratio = ratio if weight == 1 else 1 - weight + weight * ratio
    wrong = torch.nonzero(~(numbers <= ratio))
    right = int(wrong[0]) if len(wrong) else len(guesses)
    rows[:right] = -torch.inf
    rows[torch.arange(right), guesses[:right]] = 0.0
    if right < len(guesses):
        left = (p[right] - q[right]).clamp(min=0)
        # Nothing is left only where p and q are equal but for rounding.
        rows[right] = torch.where(left.sum() == 0, p[right], left).log()


def _drawn_from(scored: Tensor | None, guesses: Tensor, rows: Tensor) -> Tensor:
    """(n, V) the distributions of the guesses; what was not drawn was certain."""
    if scored is None:
        return torch.nn.functional.one_hot(guesses, rows.shape[-1]).to(rows.dtype)
    return scored.to(rows).softmax(dim=-1)


def _numbers(batch: Batch, verified: list[Drafted]) -> Iterator[Tensor]:
    """For each draft that is accepted by chance, (n,) numbers in (0, 1)."""
    spans = [
        (first, len(ids)) for request, first, ids, _ in verified if request.verification.rejects
    ]
    rows = [batch.sequences[first + i] for first, count in spans for i in range(count)]
    if not rows:
        return
    position = np.array([row.length for row in rows], dtype=np.uint64)
    places = places_of(rows, position, np.arange(len(rows)), len(rows))
    drawn = batch.draws.uniform("accept", places)[:, 0]
    start = 0
    for _, count in spans:
        yield drawn[start : start + count]
        start += count
