"""Best of several samples: what is judged, and when a majority is decided."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from everystep.strategies.best_of import VERDICT, BestOf
from everystep.types import Finished, FinishReason
from tests.strategies.making import END, batch_of


def done(index: int, answer: Any) -> Finished:
    reason = FinishReason("stop", END)
    return Finished(np.array([5, END]), 0.0, reason, 0, index, {VERDICT: answer})


@pytest.mark.parametrize("by", ["score", "majority"])
def test_a_sample_is_judged_once_with_the_token_that_ends_it(by: Any) -> None:
    seen: list[list[int]] = []

    def judge(ids: np.ndarray) -> float:
        seen.append(ids.tolist())
        return float(len(ids))

    batch = batch_of(BestOf(3, by=by, judge=judge), [[0.0, 0.0, 0.0]], generated=2)
    children = batch.groups[0].request.strategy.select(batch, ((np.array([4, END, 7]),),))
    assert seen == [[5, 5, END]]
    assert children.memo is not None
    assert [one and one[VERDICT] for one in children.memo] == [None, 3.0, None]
    assert children.tokens.ravel().tolist() == [4, END, 7]


@pytest.mark.parametrize(
    ("ended", "ending", "going", "decided"),
    [
        ([7, 7], [], 2, False),  # two others may still agree, and of equals the lowest wins
        ([7, 7, 7], [], 2, True),
        ([7, 7], [7], 2, True),
        ([7, 7, 5], [], 1, False),
        ([7, 7, 5], [7], 1, True),
        ([7, 7, None], [], 1, True),
        ([None, None], [None], 1, False),
        ([], [], 3, False),
    ],
    ids=str,
)
def test_a_majority_is_decided_where_no_vote_can_change_it(
    ended: list[Any], ending: list[Any], going: int, decided: bool
) -> None:
    answers = iter(ending)
    width = len(ended) + len(ending) + going
    strategy = BestOf(width, by="majority", judge=lambda ids: next(answers))
    batch = batch_of(strategy, [[0.0] * (len(ending) + going)])
    batch.groups[0].done = [done(index, answer) for index, answer in enumerate(ended)]
    tokens = np.array([END] * len(ending) + [4] * going)
    finish = strategy.select(batch, ((tokens,),)).finish
    kinds = [None if reason is None else reason.kind for reason in finish]
    assert kinds == ["stop"] * len(ending) + ["cancelled" if decided else None] * going


def test_votes_are_counted_and_of_equals_the_lowest_number_leads() -> None:
    strategy = BestOf(5, returns=3, by="majority", judge=len)
    group = batch_of(strategy, [[0.0]]).groups[0]
    group.done = [done(4, "a"), done(1, "b"), done(3, "b"), done(0, "a"), done(2, "c")]
    found = strategy.finish(group)
    assert [(one.index, one.score) for one in found] == [(0, 2.0), (4, 2.0), (1, 2.0)]
