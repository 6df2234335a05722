"""A request's trouble is its own: whatever one raises, the others are as they were alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import Tensor

from everystep import errors
from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine, Lockstep
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import (
    Children,
    Draft,
    Prompt,
    Request,
    Rows,
    StepOutput,
    TokenTable,
    Work,
)
from everystep.types.protocols import Schedule
from everystep.types.request import Batch, Candidates, WantedDraft
from tests.judges.drive import Drive, hash_executor, run_together
from tests.judges.mixes import Mix, random_mix

SEEDS = range(25)
SCHEDULERS: list[Callable[[], Lockstep | Continuous]] = [
    Lockstep,
    lambda: Continuous(token_budget=32, max_rows=32),
]


class Trouble(Exception):
    """What a caller's code raises."""


@dataclass(frozen=True)
class Fails:
    """Raises in its n-th call, whatever it is called with; as a processor, a stop or a drafter."""

    call: int
    error: Exception
    calls: list[int] = field(default_factory=list, hash=False, compare=False)
    tokens: ClassVar[int] = 2
    schedule: ClassVar[Schedule] = "constant"
    alternatives: ClassVar[int] = 1

    def count(self) -> None:
        """One call more."""
        self.calls.append(1)
        if len(self.calls) >= self.call:
            raise self.error

    def start(self, vocabulary: int) -> Fails:
        return self

    def propose(self, asked: list[WantedDraft], table: TokenTable) -> list[Draft]:
        self.count()
        return [Draft(np.array([one.rank])) for one in asked]

    def restart(self) -> None: ...

    def held(self) -> int:
        return 0

    def reason(self, candidates: Candidates, index: int) -> Any:
        raise NotImplementedError

    def __call__(self, rows: Any, scores: Any = None) -> Any:
        self.count()
        return np.zeros(len(rows), bool) if scores is None else scores


@dataclass(frozen=True)
class Undecided(Greedy):
    """A strategy that cannot tell who continues whom."""

    note: ClassVar[str] = "raises in select"

    def select(self, batch: Batch, picked: Any) -> Children:
        raise Trouble(f"{len(batch)} sequences")


@dataclass(frozen=True)
class Unpicked(Greedy):
    """A strategy that raises while scores are still on the device."""

    note: ClassVar[str] = "raises in pick"

    def pick(self, batch: Batch, scores: Any, earlier: Any = ()) -> Any:
        raise Trouble(f"{len(batch)} sequences")


def offenders(request: Request, call: int) -> dict[str, Request]:
    """The request with each kind of trouble."""
    error = Trouble(call)
    alone = replace(request, strategy=Greedy(), companions=(), readout=None)
    return {
        "processor": replace(request, processors=(*request.processors, Fails(call, error))),
        "stop": replace(request, stops=(*request.stops, Fails(call, error))),
        "drafter": replace(alone, drafter=Fails(call, error)),
        "strategy": replace(alone, strategy=Undecided()),
        "strategy's pick": replace(alone, strategy=Unpicked()),
    }


def run_with(requests: Iterable[Request], engine: Engine) -> Drive:
    run = Drive(engine)
    for request in requests:
        run.submit(request)
    return run.finish()


def reasons(run: Drive, name: str) -> set[str]:
    return {one.reason.kind for one in run.groups[name].done}


@pytest.mark.few(2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_error_ends_its_own_request_alone(
    seed: int, scheduler: Callable[[], Lockstep | Continuous]
) -> None:
    mix = random_mix(seed)
    expected = run_together(mix.requests, hash_executor(mix)).results
    for kind, offender in offenders(mix.requests[0], 1 + seed % 4).items():
        bad = replace(offender, request_id="offender")
        run = run_with([bad, *mix.requests], Engine(hash_executor(mix), scheduler()))
        failed = run.groups["offender"].error
        if kind.startswith("strategy"):
            assert isinstance(failed, Trouble)
        assert failed is None or isinstance(failed, Trouble)
        assert {name: run.results[name] for name in expected} == expected, kind


def test_every_error_class_raised_in_a_step_is_the_requests_own() -> None:
    mix = random_mix(3)
    expected = run_together(mix.requests, hash_executor(mix)).results
    ours = [
        one for one in vars(errors).values()
        if isinstance(one, type) and issubclass(one, Exception) and one is not errors.InvariantError
    ]  # fmt: skip
    for kind in [*ours, ValueError, KeyError, RuntimeError, IndexError, OSError, StopIteration]:
        error = kind("what happened")
        bad = replace(mix.requests[0], request_id="offender", processors=(Fails(2, error),))
        run = run_with([*mix.requests, bad], Engine(hash_executor(mix), Lockstep()))
        assert run.groups["offender"].error is error
        assert {name: run.results[name] for name in expected} == expected


def test_what_cannot_be_drawn_ends_the_request_that_scored_so() -> None:
    mix = random_mix(5)
    expected = run_together(mix.requests, hash_executor(mix)).results

    def bans_all(rows: Rows, scores: Tensor) -> Tensor:
        return scores.fill_(-np.inf) if rows.lengths[0] % 2 else scores

    bad = replace(
        mix.requests[0], request_id="offender", strategy=Sample(2), processors=(bans_all,),
        drafter=None,
    )  # fmt: skip
    run = run_with([bad, *mix.requests], Engine(hash_executor(mix), Lockstep()))
    assert isinstance(run.groups["offender"].error, errors.RequestError)
    assert {name: run.results[name] for name in expected} == expected


class Picky(HashExecutor):
    """Fails whenever a certain id is fed, as an executor may that finds an input wrong."""

    refused: int = -1

    def run(self, work: Work) -> StepOutput:
        if self.refused in work.tokens:
            raise RuntimeError("an input that cannot be read")
        return super().run(work)


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_request_that_breaks_a_forward_is_found(seed: int) -> None:
    mix = random_mix(seed)
    executor = Picky(mix.vocab_size)
    executor.refused = mix.vocab_size - 1
    apart = {r.request_id: alone(r, mix) for r in mix.requests}
    run = run_with(mix.requests, Engine(executor, Continuous(token_budget=64, max_rows=64)))
    for name, result in run.results.items():
        assert result == apart[name].results[name]
        assert reasons(run, name) == reasons(apart[name], name)
    assert executor.audit() == {}


def alone(request: Request, mix: Mix) -> Drive:
    executor = Picky(mix.vocab_size)
    executor.refused = mix.vocab_size - 1
    return run_with([request], Engine(executor, Continuous(token_budget=64, max_rows=64)))


def test_all_that_break_forwards_are_found_though_two_share_each_in_turns() -> None:
    """A step has room for the first prompt or for two of the others; after a forward that failed,
    the scheduler lets the other two in."""
    executor = Picky(12)
    executor.refused = 9
    run = Drive(Engine(executor, Continuous(token_budget=8, max_rows=5)))
    for at, length in enumerate((8, 4, 4, 4, 4)):
        prompt = Prompt(np.array([at, *[9] * (length - 1)]))
        run.submit(Request(f"request {at}", prompt, Greedy(), SeededDraws(at)))
    run.finish()
    assert all(isinstance(group.error, RuntimeError) for group in run.groups.values())
    assert run.engine.counts.forwards == 7  # the first, two of two requests, then each alone
    assert executor.audit() == {}
