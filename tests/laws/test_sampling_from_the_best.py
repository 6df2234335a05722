"""Sampling from the best of wide rows is sampling from whole rows, token for token.

Random requests with top-k, seeded, in one batch and under any schedule: on executors that report
the best, against the same executors that report whole rows. Their logits are rounded, coarsely in
some, so that ties at the last place go on beyond the list and the rows have to be read whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.draws import SeededDraws, SharedDraws
from everystep.engine import PromptLookup
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor
from everystep.models import Model
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Greedy, Sample
from everystep.types import Prompt, Request, StepOutput, Work
from tests.executors.models import PLAIN, random_model
from tests.judges.drive import run_scheduled, run_together
from tests.judges.mixes import Schedule
from tests.laws.test_best import BestExecutor

VOCABULARY, BATCHES, PROMPTS = 8_200, 25, 4


class Rounded(BestExecutor):
    """The hash model with logits that are multiples of `grain`; lists the best if it `may`."""

    def __init__(self, grain: float, may: bool) -> None:
        super().__init__(VOCABULARY)
        self._grain = grain
        if not may:
            self.abilities -= {"best"}

    def logits_of(self, output: StepOutput) -> StepOutput:
        """Before the best are taken from them."""
        return replace(output, logits=torch.round(output.logits / self._grain) * self._grain)


class WholeNative(NativeExecutor):
    """Reports whole rows alone."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.abilities -= {"best"}


class CountingNative(NativeExecutor):
    """Counts rows that are reported whole, those of which the best are, and those read again."""

    whole = listed = read = 0

    def _read_out(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self.read += len(rows)
        return super()._read_out(hidden, rows)

    def run(self, work: Work) -> StepOutput:
        output = super().run(work)
        self.whole += len(output.logits)
        self.listed += 0 if output.best is None else len(output.best.values)
        return output


def warpers(rng: np.random.Generator) -> tuple[Any, ...]:
    """Top-k of up to 63 after temperatures, and what works on lists behind it."""
    some = (
        es.TopPLogitsWarper(rng.uniform(0.2, 1.0)),
        es.MinPLogitsWarper(rng.uniform(0.0, 0.3)),
        es.TypicalLogitsWarper(rng.uniform(0.2, 0.9)),
        es.EpsilonLogitsWarper(0.01),
        es.LogitNormalization(),
    )
    heat = [es.TemperatureLogitsWarper(rng.uniform(0.2, 3.0))] if rng.random() < 0.8 else []
    behind = [one for one in some if rng.random() < 0.35]
    return (*heat, es.TopKLogitsWarper(int(rng.integers(1, 64))), *behind)


def strategy(rng: np.random.Generator) -> Any:
    """Mostly sampling; with drafts, several sequences, or greedy among it."""
    kind = rng.random()
    if kind < 0.2:
        return Sample()
    return Greedy() if kind < 0.3 else Sample(int(rng.choice([1, 1, 3])))


def requests(seed: int, highest: int) -> tuple[Request, ...]:
    """A batch of requests whose prompts repeat phrases; some share their processors."""
    rng = np.random.default_rng(seed)
    shared, batch = warpers(rng), []
    for i in range(PROMPTS):
        phrase = rng.integers(1, highest, rng.integers(2, 5))
        chosen, length = strategy(rng), int(rng.integers(4, 9))
        plain = rng.random() < 0.15 or isinstance(chosen, Greedy)
        prompt = np.tile(phrase, 3)[: rng.integers(3, 9)]
        request = Request(
            request_id=str(i),
            prompt=Prompt(ids=prompt),
            strategy=chosen,
            draws=SeededDraws(int(rng.integers(2**40))),
            processors=() if plain else shared if rng.random() < 0.5 else warpers(rng),
            stops=(EosToken((0,)), MaxLength(len(prompt) + length)),
            max_length=len(prompt) + length,
            drafter=PromptLookup(3, 2) if chosen == Sample() and rng.random() < 0.5 else None,
        )
        batch.append(request)
    return tuple(batch)


def schedule(seed: int) -> Schedule:
    """Short steps, few rows, and rows that are taken away."""
    rng = np.random.default_rng(seed)
    arrivals = tuple(int(step) for step in rng.integers(0, 6, PROMPTS))
    return Schedule(arrivals, (None,) * PROMPTS, 12, 8, None, 0.1, True, seed)


def assert_same(batch: tuple[Request, ...], seed: int, make: Callable[[bool], Executor]) -> None:
    """In one batch and under a schedule, the best of rows give what whole rows give."""
    whole = run_together(batch, make(False)).results
    assert run_together(batch, make(True)).results == whole
    assert run_scheduled(batch, schedule(seed), make(True)).results == whole


@pytest.mark.few(2)
@pytest.mark.parametrize("grain", [2.0**-18, 2.0**-9, 2.0**-6, 0.5])
def test_the_best_of_a_row_decide_as_the_row(grain: float) -> None:
    for seed in range(BATCHES):
        assert_same(requests(seed, VOCABULARY), seed, lambda may: Rounded(grain, may))


@pytest.mark.few(2)
@pytest.mark.parametrize("grain", [2.0**-9, 0.5])
def test_undecided_rows_are_read_whole_and_nothing_is_fed_again(grain: float) -> None:
    read = listed = 0
    for seed in range(BATCHES):
        batch = [one for one in requests(seed, VOCABULARY) if one.processors]
        executor = Rounded(grain, True)
        run = run_together(batch, executor)
        assert run.engine.counts.forwards == run.engine.counts.steps
        assert run.engine.counts.fed == executor.counts["tokens"]
        assert executor.whole == 0
        read, listed = read + executor.read, listed + executor.listed
    assert read > 0
    if grain < 0.5:
        assert read < listed / 2


def test_draws_without_a_seed_are_those_of_whole_rows() -> None:
    for seed in range(10):
        shared = SharedDraws()
        batch = [replace(one, draws=shared) for one in requests(seed, VOCABULARY)]
        found = []
        for may in (False, True):
            torch.manual_seed(seed)
            found.append(run_together(batch, Rounded(2.0**-9, may)).results)
        assert found[0] == found[1]


@cache
def native_model(kind: str) -> Model:
    """A wide random model; "tied" is one whose logits are few different numbers."""
    model = random_model(replace(PLAIN, vocab_size=VOCABULARY, tied=True), dtype=torch.float32)
    if kind == "tied":
        with torch.no_grad():
            model.network.head.weight[40:] = model.network.head.weight[:40].repeat(204, 1)
    return model


@pytest.mark.native
@pytest.mark.parametrize("kind", ["free", "tied"])
def test_the_native_head_reports_enough(kind: str) -> None:
    model = native_model(kind)
    for seed in range(BATCHES):
        assert_same(
            requests(seed, 40),
            seed,
            lambda may: NativeExecutor(model) if may else WholeNative(model),
        )


@pytest.mark.native
def test_sampling_from_the_best_writes_hardly_a_whole_row() -> None:
    listed = read = 0
    for seed in range(BATCHES):
        batch = [one for one in requests(seed, 40) if one.processors]
        executor = CountingNative(native_model("free"))
        run_together(batch, executor)
        assert executor.whole == 0
        listed, read = listed + executor.listed, read + executor.read
    assert listed > 20 * BATCHES and read < listed / 100  # a tie or two
