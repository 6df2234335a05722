"""Rows of given ids, and scores with everything that scores may hold."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from everystep.processors.pipeline import apply
from everystep.types import Prompt, Request, Rows, Scores, Sequence, TokenTable

VOCABULARY = 37


def a_sequence(
    table: TokenTable,
    ids: Several[int],
    processors: tuple = (),
    prompt: int = 1,
    pad: int = 0,
    index: int = 0,
) -> Sequence:
    """A sequence whose visible ids are `ids`: `prompt` were given, the first `pad` are padding."""
    prompt_ids = np.array(ids[pad : max(prompt, pad + 1)], dtype=np.int64)
    request = Request(
        request_id="r",
        prompt=Prompt(ids=prompt_ids),
        strategy=None,
        draws=None,
        processors=processors,
        pad_prefix=pad,
    )
    line = table.open(np.array(ids, dtype=np.int64))
    return Sequence(request=request, line=line, length=len(ids) - pad, index=index)


def rows_of(
    prefixes: Several[Several[int]],
    processors: tuple = (),
    prompt: int = 1,
    pads: Several[int] | None = None,
) -> Rows:
    """One row per prefix, each of a request of its own, numbered as sampled siblings are."""
    table = TokenTable()
    pads = pads or [0] * len(prefixes)
    sequences = [
        a_sequence(table, ids, processors, prompt, pad, index)
        for index, (ids, pad) in enumerate(zip(prefixes, pads, strict=True))
    ]
    return Rows(table, sequences, np.array([len(ids) for ids in prefixes], dtype=np.int64))


def rectangle(rows: int, width: int, highest: int = VOCABULARY) -> list[list[int]]:
    """Random ids, few different ones, so that n-grams repeat."""
    return torch.randint(0, min(highest, 6), (rows, width)).tolist()


def some_scores(rows: int, kind: str = "plain", vocabulary: int = VOCABULARY) -> Tensor:
    """(R, V) float32: plain, with ties, huge, with infinities, or all but one -inf."""
    scores = torch.randn(rows, vocabulary) * 4
    if kind == "ties":
        return scores.round()
    if kind == "huge":
        return scores * 1e30
    if kind == "banned":
        return scores.masked_fill(torch.rand_like(scores) < 0.5, -torch.inf)
    if kind == "single":
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([3]), 1.5)
    if kind == "infinite":
        scores[:, 5], scores[:, 6] = torch.inf, -torch.inf
    return scores


KINDS = ("plain", "ties", "huge", "banned", "single", "infinite")
FINITE_MAXIMUM = ("plain", "ties", "huge", "banned", "single")


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal bit for bit but for the sign of zero; nan equals nan."""
    alike = ours.eq(theirs) | ours.isnan() & theirs.isnan()
    return ours.dtype == theirs.dtype and bool(alike.all())


def applied(rows: Rows, scores: Tensor, *, owned: bool = False) -> Tensor:
    """(R, V) whole rows -> what their requests' processors make of them, written out."""
    return apply(rows, Scores.of(scores), owned=owned).whole().values
