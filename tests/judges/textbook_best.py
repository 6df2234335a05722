"""Best of several samples, as in its textbook: all are drawn to their ends, and then judged."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from everystep.strategies import BestOf

if TYPE_CHECKING:
    from tests.judges.prefix import Hypothesis, Prefix


def best_of(prefix: Prefix, strategy: BestOf, samples: list[Hypothesis]) -> list[Hypothesis]:
    """The best of whole samples; with a majority, as far as they were when it was certain. What
    failed is not judged, and comes last."""
    judge = strategy.judge or (lambda ids: None)
    ratings: list[Any]
    if strategy.by == "likelihood":
        ratings = [_likelihood(prefix, list(one.tokens)) for one in samples]
    else:
        nothing = None if strategy.by == "majority" else -np.inf
        ratings = [
            nothing if one.reason == "error" else judge(np.array(one.tokens)) for one in samples
        ]
    order = [*range(len(samples))]
    if strategy.by != "majority":
        order.sort(key=lambda i: (samples[i].reason == "error", -float(ratings[i])))
        return [samples[i] for i in order][: strategy.returns]
    cut, steps = samples, 0
    for steps in sorted({len(one.tokens) for one in samples}):
        votes = _votes([r for r, one in zip(ratings, samples, strict=True)
                        if len(one.tokens) <= steps])  # fmt: skip
        going = sum(len(one.tokens) > steps for one in samples)
        ranked = sorted(votes.values(), reverse=True)
        if ranked and ranked[0] > (ranked[1] if len(ranked) > 1 else 0) + going:
            break
    cut = [
        one if len(one.tokens) <= steps else replace(one, tokens=one.tokens[:steps],
                                                     reason="cancelled")
        for one in samples
    ]  # fmt: skip
    final: list[Any] = [
        r if one.reason != "cancelled" else None for r, one in zip(ratings, cut, strict=True)
    ]
    votes = _votes(final)
    first = {answer: final.index(answer) for answer in votes}
    order.sort(key=lambda i: -votes.get(final[i], 0))  # by number among equals
    order.sort(key=lambda i: (-votes.get(final[i], 0), first.get(final[i], len(final))))
    order.sort(key=lambda i: cut[i].reason in ("cancelled", "error"))
    return [cut[i] for i in order][: strategy.returns]


def _votes(answers: list[Any]) -> dict[Any, int]:
    return {one: answers.count(one) for one in answers if one is not None}


def _likelihood(prefix: Prefix, tokens: list[int]) -> float:
    """The mean log-probability of the tokens, before any processor."""
    known = [float(prefix.raw(tokens[:i]).log_softmax(-1)[token]) for i, token in enumerate(tokens)]
    return sum(known) / len(known) if known else -np.inf
