"""Interrupted, or saved and restored, a generation of a real model is the uninterrupted one.

In float64 on torch operators the last bits of a score may differ with who shares the step; natively
no bit may.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from everystep.engine import Continuous, Engine, audit
from everystep.executors.base import Executor
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from tests.engine.test_interrupts import Tripwire, finished
from tests.executors.models import family_model, narrow_model
from tests.judges.drive import Drive, result
from tests.judges.mixes import Mix, random_mix
from tests.judges.textbook import Hypothesis
from tests.laws.test_executors import for_decoder, without_positions


@dataclass(frozen=True)
class Case:
    """A model, and which executor runs it."""

    name: str
    native: bool = False

    def executor(self) -> Executor:
        """A fresh one."""
        if self.native:
            return NativeExecutor(narrow_model(self.name, None))
        config = {"mistral": {"sliding_window": 5}, "mamba": {"state_size": 4}}.get(self.name, {})
        return TorchExecutor(family_model(self.name, **config))

    def mix(self, seed: int) -> Mix:
        """Requests that the model can read."""
        mix = for_decoder(random_mix(seed))
        return without_positions(mix) if self.name == "mamba" else mix

    def same(self, one: list[Hypothesis], other: list[Hypothesis]) -> bool:
        """Whether they are equal, as closely as this executor promises."""
        if self.native:
            return one == other
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(
            a.tokens == b.tokens and a.reason == b.reason and a.score == pytest.approx(b.score)
            for a, b in pairs
        )


CASES = [
    Case("llama"),
    Case("mistral"),
    Case("mamba"),
    pytest.param(Case("llama", native=True), marks=pytest.mark.native),
]
SEEDS = [seed for seed in range(40) if len(random_mix(seed).requests) == 2][:3]


def fresh(case: Case, mix: Mix) -> Drive:
    run = Drive(Engine(case.executor(), Continuous(token_budget=24, max_rows=64)))
    for request in mix.requests:
        run.submit(request)
    return run


@pytest.mark.parametrize("often", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_interrupt_changes_nothing(case: Case, seed: int, often: int) -> None:
    mix = case.mix(seed)
    expected = fresh(case, mix).finish().results
    counting = Tripwire()
    finished(fresh(case, mix), counting)
    for at in range(1 + seed, counting.lines, 1 + counting.lines // often):
        run = fresh(case, mix)
        assert finished(run, Tripwire(at, KeyboardInterrupt)), at
        found = run.results
        assert all(case.same(found[name], expected[name]) for name in expected), at
        assert run.engine.executor.audit() == {} and run.engine.table.open_lines == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_restored_equals_uninterrupted(case: Case, seed: int) -> None:
    mix = case.mix(seed)
    request, other = mix.requests
    expected = fresh(case, mix).finish().results[request.request_id]
    for steps in (1, 3, 7):
        engine = Engine(case.executor(), Continuous(token_budget=24, max_rows=64))
        group = engine.submit(request)
        for _ in range(steps):
            if engine.pending:
                engine.step()
        if not group.live:
            break
        data = engine.dump(group)
        run = Drive(Engine(case.executor(), Continuous(token_budget=24, max_rows=64)))
        run.submit(other)
        again = run.engine.restore(request, data)
        while run.engine.pending:
            run.step()
        audit(run.engine)
        assert case.same(result(again), expected), steps
