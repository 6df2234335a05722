"""Requests choose together where they choose alike, and apart where they read other scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Engine, Lockstep
from everystep.engine.batches import best_needed
from everystep.processors.warpers import TemperatureLogitsWarper
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request, Wants
from everystep.types.hooks import Hook
from everystep.types.request import Strategy
from tests.judges.drive import Drive
from tests.laws.test_best import BestExecutor

VOCABULARY = 23


def request(name: str, strategy: Strategy, *, whole: bool = False, hot: bool = False) -> Request:
    """`whole`: it reads whole rows of logits."""
    return Request(
        name, Prompt(ids=np.array([3, 1, len(name)])), strategy, SeededDraws(4),
        (TemperatureLogitsWarper(2.0),) if hot else (), (MaxLength(9),), max_length=9,
        wants=Wants(logprobs=1 if whole else None),
    )  # fmt: skip


def test_whoever_reads_whole_rows_chooses_apart_from_whoever_reads_the_best() -> None:
    """Though both have one strategy."""
    shared = Greedy()
    asked = [request("a", shared), request("bb", shared, whole=True), request("ccc", shared)]
    alone: dict[str, list[int]] = {}
    for one in asked:
        alone |= _run(Engine(BestExecutor(VOCABULARY), Lockstep()), [one])
    executor = BestExecutor(VOCABULARY)
    assert _run(Engine(executor, Lockstep()), asked) == alone
    assert executor.listed == 2 * executor.whole > 0


@pytest.mark.parametrize("strategy", [Greedy, Sample])
def test_equal_strategies_choose_together_whatever_their_processors(
    strategy: type[Greedy] | type[Sample],
) -> None:
    together = list[int]()
    engine = Engine(
        HashExecutor(VOCABULARY),
        Lockstep(),
        (lambda step: together.append(len(step.scored.groups)),),
    )
    _run(engine, [request("a", strategy()), request("bb", strategy(), hot=True)])
    assert {*together} == {2}


def _run(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    going = Drive(engine)
    for one in requests:
        going.submit(one)
    going.finish()
    return {name: group.done[0].tokens.tolist() for name, group in going.groups.items()}


@pytest.mark.parametrize("reads", [(), ("hidden",), ("logits",), ("scores",)])
def test_a_whole_row_is_read_for_hooks_that_read_scores_alone(reads: tuple[str, ...]) -> None:
    hook = type("Reading", (Hook,), {"reads": reads})()
    prompt = Prompt(ids=np.array([5, 6, 7]))
    asked = Request("0", prompt, Greedy(), SeededDraws(5), max_length=8, hooks=(hook,))
    whole = bool({"logits", "scores"} & {*reads})
    plain = best_needed(replace(asked, hooks=()), 50)
    assert plain == 1 and best_needed(asked, 50) == (0 if whole else plain)
