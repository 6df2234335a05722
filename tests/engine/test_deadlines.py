"""A request with a deadline ends there, whether it waits or runs, and nobody else notices.

The clock is one that the test moves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Continuous, DraftModel, Engine, Lockstep, Turns, audit
from everystep.engine.watching import WatchedStep
from everystep.stops.ends import MaxLength
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request
from tests.engine.test_interrupts import Interrupt, Tripwire, step
from tests.judges.drive import Drive

SIZE = 23
NEW = 12


@dataclass
class Clock:
    """Seconds that a test moves, and how often they were read."""

    now: float = 100.0
    reads: int = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@dataclass
class Watching:
    """A watcher that keeps what it is told."""

    stages: bool = False
    told: list[WatchedStep] = field(default_factory=list)

    def __call__(self, step: WatchedStep) -> None:
        self.told.append(step)


def request(name: str, deadline: float | None = None, **changes: Any) -> Request:
    ids = np.arange(7) % 5 + len(name)
    plain = Request(
        name, Prompt(ids), Greedy(), SeededDraws(5), stops=(MaxLength(7 + NEW),),
        max_length=7 + NEW, deadline=deadline,
    )  # fmt: skip
    return replace(plain, **changes)


def run_of(clock: Clock, scheduler: Any = None) -> Drive:
    return Drive(Engine(HashExecutor(SIZE), scheduler or Continuous(), clock=clock))


def ends(run: Drive, name: str) -> set[str]:
    return {done.reason.kind for done in run.groups[name].done}


def alone(asked: Request) -> Any:
    run = run_of(Clock())
    run.submit(replace(asked, deadline=None))
    return run.finish().results[asked.request_id]


@pytest.mark.parametrize(
    "scheduler", [partial(Continuous, max_rows=1), Turns], ids=["no room", "another's turn"]
)
def test_a_request_that_waits_ends_without_having_fed_anything(
    scheduler: Callable[[], Any],
) -> None:
    clock = Clock()
    run = run_of(clock, scheduler())
    run.submit(request("runs"))
    if isinstance(run.engine.scheduler, Turns):
        run.engine.scheduler.turn = run.groups["runs"]
    run.submit(request("waits", deadline=105.0))
    for _ in range(4):
        run.step()
    assert ends(run, "waits") == set()
    clock.now = 105.0
    run.step()
    assert ends(run, "waits") == {"time"}
    (event,) = [one for one in run.events if one.request_id == "waits"]
    assert (event.token, event.position) == (-1, 0)
    audit(run.engine)
    run.finish()
    assert run.results["runs"] == alone(request("runs"))
    assert run.engine.counts.fed == 7 + NEW - 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": Sample(3)},
        {"strategy": Beam(3, 2, max_new=NEW)},
        {"strategy": Contrastive(3, 0.6)},
        {"drafter": DraftModel(partial(HashExecutor, SIZE), 3)},
    ],
    ids=["greedy", "samples", "beams", "contrastive", "drafts"],
)
def test_one_that_runs_keeps_its_tokens_and_its_neighbours_do_not_notice(
    changes: dict[str, Any],
) -> None:
    clock = Clock()
    run = run_of(clock)
    run.submit(request("late", 101.0, **changes))
    run.submit(request("other", **changes))
    for _ in range(2):
        run.step()
    clock.now = 101.5
    run.step()
    assert ends(run, "late") == {"time"}
    whole, other = alone(request("late", **changes)), alone(request("other", **changes))
    run.finish()
    assert run.results["other"] == other
    found = run.results["late"][0].tokens
    assert len(found) < NEW
    if not isinstance(changes.get("strategy"), Beam):
        assert found == whole[0].tokens[: len(found)] and len(found) > 0
    audit(run.engine)


def test_in_a_rectangle_the_others_go_on() -> None:
    clock = Clock()
    run = run_of(clock, Lockstep())
    lines = [request("late", 101.0, linger=True), request("b", linger=True)]
    for one in lines:
        run.submit(one)
    run.step()
    clock.now = 102.0
    run.finish()
    assert ends(run, "late") == {"time"} and ends(run, "b") == {"length"}
    assert run.results["b"] == alone(request("b"))


def test_one_that_is_set_aside_ends_too() -> None:
    clock, scheduler = Clock(), Continuous()
    run = run_of(clock, scheduler)
    run.submit(request("aside", 101.0))
    run.step()
    scheduler.set_aside(run.groups["aside"])
    clock.now = 101.0
    run.step()
    assert ends(run, "aside") == {"time"} and not run.engine.pending


def test_a_watcher_is_told_of_an_end_beside_one_that_nobody_watches() -> None:
    """No forward has been that it could be told of."""
    clock, watcher = Clock(), Watching()
    run = run_of(clock)
    run.submit(request("watched", deadline=105.0, watcher=watcher))
    run.submit(request("unwatched", deadline=105.0))
    run.step()
    before, clock.now = len(watcher.told), 105.0
    run.step()
    assert ends(run, "watched") == ends(run, "unwatched") == {"time"}
    (last,) = watcher.told[before:]
    assert last.request.request_id == "watched" and last.record is None
    assert [one.token for one in last.events] == [-1]


def test_the_clock_is_read_once_per_step_and_not_without_deadlines() -> None:
    clock = Clock()
    run = run_of(clock)
    run.submit(request("free"))
    run.finish()
    assert clock.reads == 0
    for name in ("a", "b", "c"):
        run.submit(request(name, deadline=1e9))
    before = run.engine.counts.steps
    run.finish()
    assert clock.reads == run.engine.counts.steps - before


def test_a_request_that_is_over_is_not_ended_again() -> None:
    """One whose group stays, for the sake of its rows."""
    clock = Clock()
    run = run_of(clock, Lockstep())
    run.submit(request("kept", 200.0, linger=True, keeps=True))
    for _ in range(NEW):
        run.step()
    assert ends(run, "kept") == {"length"}
    clock.now = 300.0
    run.step()
    run.engine.cancel(run.groups["kept"])
    assert ends(run, "kept") == {"length"}


def test_an_interrupt_while_it_ends_changes_nothing() -> None:
    wanted = alone(request("other"))
    for at in range(1, 400, 7):
        clock = Clock()
        run = run_of(clock, Continuous(max_rows=1))
        run.submit(request("other"))
        run.submit(request("late", 101.0))
        run.step()
        clock.now = 102.0
        with suppress(Interrupt):
            Tripwire(at).run(partial(step, run))
        run.finish()
        assert ends(run, "late") == {"time"}
        assert run.results["other"] == wanted
