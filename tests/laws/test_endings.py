"""Nothing is left behind, however a request ends, and a broken step changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
from torch import Tensor

from everystep.engine import Continuous, Engine, Lockstep, audit
from everystep.testing.hash_model import HashExecutor
from everystep.types import Request, Rows, StepOutput, Work
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.mixes import Mix, random_mix

SEEDS = range(30)


class Interrupt(BaseException):
    """What a test throws into a step."""


@dataclass(frozen=True)
class FailsOnce:
    """A processor that fails in its third call."""

    calls: list[int] = field(default_factory=list, hash=False)

    def __call__(self, rows: Rows, scores: Tensor) -> Tensor:
        self.calls.append(len(rows))
        if len(self.calls) == 3:
            raise Interrupt
        return scores


class BrokenExecutor(HashExecutor):
    """The hash model, whose third forward is interrupted before, amid or after its work."""

    amid: str = "before"

    def run(self, work: Work) -> StepOutput:
        breaks = self.counts["forwards"] == 2 and len(work.rows) and self.amid != ""
        if not breaks:
            return super().run(work)
        amid, self.amid = self.amid, ""
        if amid == "verbs":
            super().run(only_verbs(work))
        elif amid == "after":
            super().run(work)
        raise Interrupt


def only_verbs(work: Work) -> Work:
    """The work without its feeds."""
    none = work.rows[:0]
    return replace(
        work, rows=none, starts=none, counts=none, logits=none, tokens=none, extras={}
    )  # fmt: skip


def broken_executor(mix: Mix, amid: str) -> BrokenExecutor:
    executor = BrokenExecutor(mix.vocab_size)
    executor.amid = amid
    return executor


def submitted(requests: Iterable[Request], engine: Engine) -> Drive:
    """A run with all the requests, not begun."""
    run = Drive(engine)
    for request in requests:
        run.submit(request)
    return run


def step_until_broken(run: Drive) -> None:
    """The run is over, or its step has been interrupted."""
    try:
        while run.engine.pending:
            run.step()
    except Interrupt:
        audit(run.engine)


def leaves_nothing(engine: Engine) -> bool:
    """After cancelling whatever is not over."""
    for group in list(engine.scheduler.groups):
        engine.cancel(group)
    audit(engine)
    return engine.executor.audit() == {} and engine.table.open_lines == 0


@pytest.mark.few(2)
@pytest.mark.parametrize("scheduler", [Lockstep, lambda: Continuous(token_budget=32, max_rows=32)])
@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_at_any_step(seed: int, scheduler: Callable[[], Lockstep | Continuous]) -> None:
    mix = random_mix(seed)
    run = submitted(mix.requests, Engine(hash_executor(mix), scheduler()))
    for _ in range(seed % 6):
        if run.engine.pending:
            run.step()
    assert leaves_nothing(run.engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("amid", ["before", "verbs", "after"])
@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_after_a_broken_forward(seed: int, amid: str) -> None:
    mix = random_mix(seed)
    run = submitted(mix.requests, Engine(broken_executor(mix, amid), Lockstep()))
    step_until_broken(run)
    assert leaves_nothing(run.engine)


@pytest.mark.few(2)
@pytest.mark.parametrize("amid", ["before", "verbs", "after"])
@pytest.mark.parametrize("seed", SEEDS)
def test_going_on_after_a_broken_forward(seed: int, amid: str) -> None:
    mix = random_mix(seed)
    run = submitted(mix.requests, Engine(broken_executor(mix, amid), Lockstep()))
    step_until_broken(run)
    assert run.finish().results == run_together(mix.requests, hash_executor(mix)).results


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_going_on_after_a_broken_processor(seed: int) -> None:
    mix = random_mix(seed)
    broken = [replace(r, processors=(FailsOnce(), *r.processors)) for r in mix.requests]
    run = submitted(broken, Engine(hash_executor(mix), Lockstep()))
    for _ in broken:  # each of them breaks one step
        step_until_broken(run)
    assert run.finish().results == run_together(mix.requests, hash_executor(mix)).results
