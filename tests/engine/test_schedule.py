"""Who feeds how much: nobody waits while there is room, and nobody waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine, Guidance, Lockstep, Reuse, audit
from everystep.engine.feed import Grant
from everystep.engine.schedule import Join, Preempt
from everystep.errors import OversizeError
from everystep.stops.ends import MaxLength
from everystep.strategies import Beam, Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import Group, Prompt, Request
from tests.judges.drive import Drive

VOCABULARY = 40


# What prompts share is another question than what they take of a step.
APART = Reuse(least=10_000)


@dataclass
class Watched(Continuous):
    """The scheduler, with all that it has planned."""

    plans: list[list[Grant]] = field(default_factory=list)

    def plan(self, preempt: Preempt, join: Join | None = None) -> list[Grant]:
        self.plans.append(super().plan(preempt, join))
        return self.plans[-1]


def ids(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count) * 7 % VOCABULARY


def request(name: str, strategy: Any, prompt: int = 3, new: int = 1_000, **rest: Any) -> Request:
    """A request that nothing ends but its length."""
    draws = SeededDraws(sum(map(ord, name)))
    return Request(
        name, Prompt(ids(prompt, len(name))), strategy, draws, max_length=prompt + new, **rest
    )


def limited(one: Request, new: int) -> Request:
    """The request, which ends after so many tokens."""
    limit = one.prompt_visible + new
    return replace(one, stops=(MaxLength(limit),), max_length=limit)


def guided(name: str, prompt: int, companion: int) -> Request:
    """A request with a second prompt whose rows mirror its own."""
    return request(
        name, Greedy(), prompt, companions=(Prompt(ids(companion, 5)),), readout=Guidance(1.5)
    )


def running(scheduler: Continuous, requests: Iterable[Request]) -> Drive:
    run = Drive(Engine(HashExecutor(VOCABULARY), scheduler))
    for one in requests:
        run.submit(one)
    return run


def choices(run: Drive) -> dict[str, int]:
    """Request id -> how often each of its sequences has chosen."""
    return {name: min(s.generated for s in group.live) for name, group in run.groups.items()}


def names(groups: Iterable[Group]) -> list[str]:
    return [group.request.request_id for group in groups]


# --- who comes first ------------------------------------------------------------------------------


def test_wide_groups_that_do_not_fit_together_take_turns() -> None:
    wide = [request("one", Sample(8)), request("two", Sample(8))]
    run = running(Continuous(token_budget=10), [*wide, request("narrow", Greedy())])
    for _ in range(40):
        run.step()
    found = choices(run)
    assert min(found["one"], found["two"]) >= 15
    assert found["narrow"] >= 30
    assert found["one"] + found["two"] >= 36  # a wide one chooses in almost every step


def test_what_was_passed_over_comes_first_later() -> None:
    scheduler = Watched(token_budget=10)
    run = running(scheduler, [request(name, Sample(8)) for name in ("one", "two", "three")])
    for _ in range(6):
        run.step()
    before = choices(run)
    scheduler.plans.clear()
    for _ in range(6):
        run.step()
    first = [names(grant.group for grant in plan)[0] for plan in scheduler.plans]
    assert set(first) == set(before)
    assert all(choices(run)[name] > before[name] for name in before)


def test_a_long_prompt_does_not_stop_the_others() -> None:
    run = running(
        Continuous(token_budget=8),
        [request("long", Greedy(), 400), *(request(f"short {i}", Greedy()) for i in range(4))],
    )
    for _ in range(60):
        run.step()
    found = choices(run)
    assert all(found[f"short {i}"] >= 20 for i in range(4)), found
    assert run.groups["long"].live[0].cached >= 100


def test_groups_that_were_dumped_elsewhere_take_turns_too() -> None:
    """Both were the first of their engines."""
    asked = [request("one", Sample(8)), request("two", Sample(8))]
    run = running(Continuous(token_budget=10), [])
    for one in asked:
        other = running(Continuous(token_budget=10), [one])
        other.step()
        data = other.engine.dump(other.groups[one.request_id])
        run.groups[one.request_id] = run.engine.restore(one, data)
    assert len({group.rank for group in run.groups.values()}) == 2
    for _ in range(40):
        run.step()
    assert min(choices(run).values()) >= 12


# --- how much -------------------------------------------------------------------------------------


def test_only_those_are_granted_positions_who_can_use_them() -> None:
    scheduler = Watched(token_budget=10)
    asked = [
        request("one", Sample(8), 5),
        request("two", Sample(8), 12),
        request("long", Greedy(), 90),
    ]
    run = running(scheduler, asked)
    counts = run.engine.executor.counts  # type: ignore[attr-defined]
    for _ in range(40):
        pending = {name: group.pending for name, group in run.groups.items()}
        tokens, done = counts["tokens"], choices(run)
        run.step()
        for grant in scheduler.plans[-1]:
            name = grant.group.request.request_id
            fewer = grant.group.pending < pending[name]
            assert fewer or choices(run)[name] > done[name], name
        # What is left over was of no use to anybody: no group chooses with it, or begins.
        assert 8 <= counts["tokens"] - tokens <= 10


def test_after_a_preemption_only_what_is_shared_is_reserved() -> None:
    asked = [request("wide", Sample(4), 100), request("next", Greedy(), 20)]
    run = running(Continuous(token_budget=130, reuse=APART), asked)
    for _ in range(3):
        run.step()
    wide, other = (run.groups[one.request_id] for one in asked)
    run.engine.preempt(wide)
    run.engine.preempt(other)
    fed = run.engine.counts.fed
    run.step()
    assert run.engine.counts.fed - fed == 100 + other.live[0].length - 1
    run.step()
    assert choices(run) == {"wide": 4, "next": 5}


def test_what_needs_more_than_there_is_is_refused() -> None:
    run = running(Continuous(token_budget=7, max_rows=9), [])
    with pytest.raises(OversizeError, match="token_budget"):
        run.submit(request("wide", Sample(8)))
    with pytest.raises(OversizeError, match="max_rows"):
        run.submit(request("wider", Sample(10)))
    run.submit(request("fits", Sample(7), new=4))


# --- admission ------------------------------------------------------------------------------------


def test_a_prompt_that_beams_share_counts_once() -> None:
    scheduler = Continuous(max_positions=300, reuse=APART)
    beams = Beam(4, eos_count=0, max_new=50)
    run = running(scheduler, [request(name, beams, 100, 50) for name in ("one", "two")])
    for _ in range(5):
        run.step()
    assert names(scheduler.running) == ["one", "two"]
    assert run.engine.counts.preemptions == 0
    # Their own tokens count for each: two prompts and 2 * 4 * 13 tokens are too many.
    for _ in range(9):
        run.step()
    assert names(scheduler.running) == ["one"]
    assert run.engine.counts.preemptions == 1


@pytest.mark.parametrize(
    ("prompt", "companion", "both"),
    [(100, 5, True), (5, 100, True), (100, 100, False), (60, 100, False)],
)
def test_companions_count_at_their_own_length(prompt: int, companion: int, both: bool) -> None:
    scheduler = Continuous(max_positions=250)
    run = running(scheduler, [guided(name, prompt, companion) for name in ("one", "two")])
    run.step()
    assert names(scheduler.running) == (["one", "two"] if both else ["one"])
    assert names(scheduler.groups) == ["one", "two"]


def test_tokens_of_companions_count_too() -> None:
    scheduler = Continuous(max_positions=40)
    run = running(scheduler, [guided(name, 5, 5) for name in ("one", "two")])
    while len(scheduler.running) < 2 or run.engine.counts.steps == 0:
        run.step()
    while len(scheduler.running) == 2:
        run.step()
    # 2 * (5 + 5 + 2 * 5) positions fit; with the sixth token they do not, and one goes on alone.
    assert choices(run)["one"] == 7


def test_who_waits_costs_no_memory() -> None:
    long = 100_000
    scheduler = Continuous(token_budget=64, max_rows=3)
    shorts = [limited(request(f"short {i}", Greedy(), 10), 1) for i in range(1_000)]
    run = running(scheduler, [request("long", Greedy(), long), *shorts])
    table, most = run.engine.table, 0
    for _ in range(20):
        run.step()
        most = max(most, table.open_lines)
    assert len(scheduler.waiting) > 900
    assert 0 < most <= 3
    room = table.data.shape
    assert room[0] <= 16 and room[1] <= 2 * long  # and no line for each of a thousand
    assert all(group.live[0].line < 0 for group in scheduler.waiting)


# --- queues ---------------------------------------------------------------------------------------


class Cut(deque[Group]):
    """A queue in which a call of this name is interrupted after, or before, it has happened."""

    name, after = "", False

    def _call(self, name: str, *given: Any) -> Any:
        cut = name == self.name
        if cut:
            self.name = ""
        if cut and not self.after:
            raise KeyboardInterrupt
        found = getattr(super(), name)(*given)
        if cut:
            raise KeyboardInterrupt
        return found

    def popleft(self) -> Group:
        return self._call("popleft")

    def appendleft(self, group: Group) -> None:
        self._call("appendleft", group)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["popleft", "appendleft"])
def test_a_group_that_an_interrupt_left_in_both_queues_runs_once(name: str, after: bool) -> None:
    asked = [limited(request(one, Sample(2), 6), 8) for one in ("one", "two", "three")]
    expected = Drive(Engine(HashExecutor(VOCABULARY), Lockstep()))
    for one in asked:
        expected.submit(one)
    queue = Cut()
    scheduler = Continuous(max_positions=50, waiting=queue)
    run = running(scheduler, asked)
    queue.name, queue.after = name, after
    interrupts = 0
    while run.engine.pending:
        try:
            run.step()
        except KeyboardInterrupt:
            interrupts += 1
            both = [one for one in scheduler.running if one in scheduler.waiting]
            assert bool(both) is ((name == "popleft") is not after)
            assert len(set(names(scheduler.groups))) == len(scheduler.groups) == 3
            audit(run.engine)
    assert interrupts == 1
    assert run.finish().results == expected.finish().results


@pytest.mark.parametrize("make", [Lockstep, lambda: Continuous(max_rows=2)])
def test_to_remove_a_group_again_changes_nothing(make: Any) -> None:
    scheduler = make()
    run = running(scheduler, [request(name, Greedy()) for name in ("one", "two", "three", "four")])
    run.step()
    two, four = run.groups["two"], run.groups["four"]
    for _ in range(2):
        scheduler.remove(two)
        scheduler.remove(four)
        assert names(scheduler.groups) == ["one", "three"]
    plan = scheduler.plan(run.engine.preempt)
    assert names(grant.group for grant in plan) == ["one", "three"]


def test_who_is_over_leaves_nothing_in_the_scheduler() -> None:
    scheduler = Continuous(token_budget=16, max_rows=8, max_positions=60)
    run = running(scheduler, [limited(request(f"{i}", Sample(2), 5), 5) for i in range(9)])
    run.finish()
    assert (scheduler.running, list(scheduler.waiting), scheduler.served) == ([], [], {})


# --- set aside ------------------------------------------------------------------------------------


def test_a_group_set_aside_feeds_nothing_and_keeps_its_rows() -> None:
    scheduler = Continuous(max_rows=4)
    run = running(scheduler, [request("one", Sample(2)), request("two", Greedy())])
    run.step()
    before, one = choices(run), run.groups["one"]
    scheduler.set_aside(one)
    for _ in range(5):
        run.step()
    assert choices(run) == {"one": before["one"], "two": before["two"] + 5}
    audit(run.engine)
    scheduler.take_back(one)
    run.step()
    assert choices(run)["one"] == before["one"] + 1
    assert run.engine.counts.preemptions == 0


@pytest.mark.parametrize("limit", [{"max_rows": 4}, {"max_rows": 9, "max_positions": 20}], ids=str)
def test_rows_of_groups_set_aside_are_there_for_others(limit: dict[str, int]) -> None:
    scheduler = Continuous(**limit)
    run = running(scheduler, [request("aside", Sample(2), 4), request("runs", Greedy(), 4)])
    run.step()
    aside = run.groups["aside"]
    scheduler.set_aside(aside)
    run.submit(request("fits", Greedy(), 1))
    run.step()
    audit(run.engine)
    assert choices(run) == {"aside": 1, "runs": 2, "fits": 1}
    assert run.engine.counts.preemptions == 0
    for name in ("further", "late"):
        run.submit(request(name, Greedy(), 2))
        for _ in range(4):
            run.step()
            audit(run.engine)
            held = sum(group.rows for group in [*scheduler.running, *scheduler._kept()])
            assert held <= scheduler.max_rows
    assert aside.pending == 2 * 5, "it has no rows"
    scheduler.take_back(aside)
    assert scheduler.waiting[0] is aside
    while aside not in scheduler.running:
        run.step()
        done = next(group for name, group in run.groups.items() if name != "aside" and group.live)
        run.events += run.engine.cancel(done)
    run.step()
    assert aside.live[0].generated > 1
    audit(run.engine)
