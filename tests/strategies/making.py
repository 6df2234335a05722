"""A batch as the engine gives it to a strategy, made by hand."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any, cast

import numpy as np

from everystep.strategies.base import Batch
from everystep.types import FinishReason, Group, Prompt, Request, Sequence, TokenTable

VOCABULARY = 11
END = 2


def stops_at_the_end(parents: np.ndarray, tokens: np.ndarray) -> list[FinishReason | None]:
    """One token ends what it follows."""
    return [FinishReason("stop", END) if token == END else None for token in tokens.tolist()]


def batch_of(strategy: Any, scores: Several[Several[float]], generated: int = 1) -> Batch:
    """One group per list, of sequences with these scores, which have generated tokens 5 so far."""
    table, groups = TokenTable(), []
    for rank, own in enumerate(scores):
        request = Request(f"r{rank}", Prompt(ids=np.array([1])), strategy, cast(Any, None))
        ids = np.array([1, *[5] * generated])
        live = [
            Sequence(request, table.open(ids), len(ids), index=i, score=score)
            for i, score in enumerate(own)
        ]
        groups.append(Group(request, rank, live, opened=True))
    sequences = [one for group in groups for one in group.live]
    numbers = np.arange(len(sequences))
    owner = np.repeat(np.arange(len(groups)), [len(group.live) for group in groups])
    return Batch(
        groups, sequences, owner, table, numbers, len(sequences), cast(Any, None), VOCABULARY,
        cast(Any, None), stops_at_the_end,
    )  # fmt: skip
