"""A step happens or it does not: an interrupt at any line of it, then going on, changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

import everystep
from everystep.engine import Continuous, Engine, audit
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.mixes import Mix, random_mix

PACKAGE = everystep.__file__.removesuffix("__init__.py")


class Interrupt(BaseException):
    """What is raised in the middle."""


class Tripwire:
    """Counts the lines of the package that run, and raises at the k-th."""

    def __init__(self, at: int | None = None, error: type[BaseException] = Interrupt) -> None:
        self.at, self.error = at, error
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if (
            not frame.f_code.co_filename.startswith(PACKAGE)
            or "/testing/" in frame.f_code.co_filename
        ):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise self.error(f"at {frame.f_code.co_filename}:{frame.f_lineno}")
        return self

    def run(self, function: Callable[[], Any]) -> Any:
        """The function under the wire; it is gone afterwards."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(before)


def fresh(mix: Mix) -> Drive:
    run = Drive(Engine(hash_executor(mix), Continuous(token_budget=64, max_rows=64)))
    for request in mix.requests:
        run.submit(request)
    return run


def step(run: Drive) -> None:
    """One line, so that nothing falls between the step and what a consumer has of it."""
    run.events.extend(run.engine.step())


def finished(run: Drive, wire: Tripwire | None = None) -> bool:
    """Goes on until nothing is pending; whether the wire raised on the way."""
    tripped = False
    while run.engine.pending:
        try:
            if wire is None or tripped:
                run.step()
            else:
                wire.run(partial(step, run))
        except (Interrupt, KeyboardInterrupt, MemoryError):
            tripped = True
    run.finish()
    return tripped


def lines_of(mix: Mix) -> int:
    wire = Tripwire()
    finished(fresh(mix), wire)
    return wire.lines


SMALL = [seed for seed in range(60) if len(random_mix(seed).requests) <= 2][:8]


@pytest.mark.parametrize("error", [Interrupt, MemoryError])
@pytest.mark.parametrize(
    "seed", [*SMALL[:4], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SMALL[4:])]
)
def test_an_interrupt_changes_nothing(seed: int, error: type[BaseException]) -> None:
    mix = random_mix(seed)
    expected = run_together(mix.requests, hash_executor(mix)).results
    total = lines_of(mix)
    for at in range(1 + seed % 211, total, 211):
        run = fresh(mix)
        assert finished(run, Tripwire(at, error)), at
        assert run.results == expected, at
        assert run.engine.executor.audit() == {} and run.engine.table.open_lines == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", SMALL[:3])
def test_an_interrupt_at_any_line_changes_nothing(seed: int) -> None:
    mix = random_mix(seed)
    expected = run_together(mix.requests, hash_executor(mix)).results
    for at in range(1, lines_of(mix)):
        run = fresh(mix)
        assert finished(run, Tripwire(at)), at
        assert run.results == expected, at


@pytest.mark.parametrize(
    "seed", [*SMALL[:2], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SMALL[2:4])]
)
def test_two_interrupts_in_a_row_change_nothing(seed: int) -> None:
    """The second one falls into what mends the first."""
    mix = random_mix(seed)
    expected = run_together(mix.requests, hash_executor(mix)).results
    total = lines_of(mix)
    for at in range(50 + seed, total, 1777):
        for again in range(1, 400, 97):
            run = fresh(mix)
            wire = Tripwire(at)
            while run.engine.pending and wire.lines < at:
                try:
                    wire.run(partial(step, run))
                except Interrupt:
                    break
            finished(run, Tripwire(again))
            assert run.results == expected, (at, again)
            audit(run.engine)
