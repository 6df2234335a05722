"""Runs mixes on engines, under any scheduler, and gathers what came out.

A run that does not end, a request that fails, an event that contradicts the result and a row that
outlives its request are errors here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from everystep.engine import Continuous, Engine, Lockstep, audit
from everystep.engine.engine import Observer
from everystep.errors import InvariantError
from everystep.executors.base import Executor
from everystep.testing.hash_model import HashExecutor
from everystep.types import Event, Group, Request
from tests.judges.dice import EMBED_DIM
from tests.judges.mixes import Mix, Schedule
from tests.judges.textbook import Hypothesis

MOST_STEPS = 2_000
# Without end, preemptions could keep a long prompt from ever being fed.
PREEMPTIONS_EACH = 2


@dataclass
class Drive:
    """An engine on its way through some requests, and what it said."""

    engine: Engine
    groups: dict[str, Group] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)

    def submit(self, request: Request) -> None:
        """The request waits for its turn."""
        self.groups[request.request_id] = self.engine.submit(request)

    def step(self) -> None:
        if self.engine.counts.forwards >= MOST_STEPS:
            raise InvariantError("the run does not end", got=f"{MOST_STEPS} forwards")
        self.events += self.engine.step()

    def cancel(self, request: Request) -> None:
        """The request ends here, if it is not over."""
        group = self.groups[request.request_id]
        if group in self.engine.scheduler.groups:
            self.events += self.engine.cancel(group)
            self.cancelled.add(request.request_id)

    def finish(self) -> Drive:
        """All requests are over, and nothing of them is left."""
        while self.engine.pending:
            self.step()
        audit(self.engine)
        for group in self.groups.values():
            _check_events(group, self.events)
        return self

    def unbroken(self) -> Drive:
        """All requests are over, and none of them has failed."""
        for group in self.finish().groups.values():
            if group.error is not None:
                raise group.error
        return self

    @property
    def results(self) -> dict[str, list[Hypothesis]]:
        """Request id -> its result."""
        return {name: result(group) for name, group in self.groups.items()}


def result(group: Group) -> list[Hypothesis]:
    """What a group that is over has to show."""
    return [
        Hypothesis(tuple(done.tokens.tolist()), done.score, done.reason.kind)
        for done in group.request.strategy.finish(group)
    ]


def hash_executor(mix: Mix, max_rows: int | None = None) -> HashExecutor:
    """A fresh executor for the mix."""
    return HashExecutor(mix.vocab_size, EMBED_DIM, max_rows=max_rows)


def run_together(
    requests: Iterable[Request], executor: Executor, chunk: int | None = None
) -> Drive:
    """All requests as one lockstep batch."""
    run = Drive(Engine(executor, Lockstep(chunk)))
    for request in requests:
        run.submit(request)
    return run.unbroken()


def run_scheduled(
    requests: tuple[Request, ...],
    schedule: Schedule,
    executor: Executor,
    observers: Iterable[Observer] = (),
) -> Drive:
    """The requests come, go, are cancelled, wait and lose their rows as the schedule says."""
    limits = (schedule.token_budget, schedule.max_rows, schedule.max_positions)
    scheduler = Continuous(*limits, reuse=schedule.reuse)
    run = Drive(Engine(executor, scheduler, observers))
    rng = np.random.default_rng(schedule.seed)
    last = max(schedule.arrivals)
    step = 0
    while step <= last or run.engine.pending:
        _happenings(run, requests, schedule, step)
        _preempt(run, schedule, rng)
        _set_aside(run, scheduler, schedule, rng)
        if scheduler.running or scheduler.waiting:
            run.step()
        if schedule.audits:
            audit(run.engine)
        step += 1
    return run.unbroken()


def _happenings(run: Drive, requests: tuple[Request, ...], schedule: Schedule, step: int) -> None:
    for request, arrival in zip(requests, schedule.arrivals, strict=True):
        if arrival == step:
            run.submit(request)
    for request, cancel in zip(requests, schedule.cancels, strict=True):
        if cancel == step and request.request_id in run.groups:
            run.cancel(request)


def _preempt(run: Drive, schedule: Schedule, rng: np.random.Generator) -> None:
    groups = run.engine.scheduler.groups
    left = run.engine.counts.preemptions < PREEMPTIONS_EACH * len(schedule.arrivals)
    if groups and left and rng.random() < schedule.preempt_rate:
        run.engine.preempt(groups[rng.integers(len(groups))])


def _set_aside(
    run: Drive, scheduler: Continuous, schedule: Schedule, rng: np.random.Generator
) -> None:
    """Groups that nobody reads take no part for some steps."""
    for group in scheduler.aside:
        if rng.random() < 0.3:
            scheduler.take_back(group)
    groups = [*scheduler.running, *scheduler.waiting]
    if groups and rng.random() < schedule.preempt_rate:
        scheduler.set_aside(groups[rng.integers(len(groups))])


def _check_events(group: Group, events: list[Event]) -> None:
    """The events of a request spell its result, token by token, and end it once."""
    name = group.request.request_id
    by_index: dict[int, list[Event]] = {}
    for event in events:
        if event.request_id == name:
            by_index.setdefault(event.index, []).append(event)
    for index, hypothesis in enumerate(result(group)):
        own = by_index.pop(index, [])
        tokens = tuple(event.token for event in own if event.token >= 0)
        ends = [event.finish.kind for event in own if event.finish]
        places = [event.position for event in own if event.token >= 0]
        right = tokens == hypothesis.tokens and places == list(range(len(tokens)))
        closed = ends == [hypothesis.reason] and own[-1].finish is not None
        # The reason rides on the last token unless something else than that ended the request.
        cut_short = hypothesis.reason in ("cancelled", "error", "time") or not tokens
        if not (right and closed and (cut_short or len(own) == len(tokens))):
            raise InvariantError(f"the events of {name}, {index}", wanted=hypothesis, got=own)
    if by_index:
        raise InvariantError(f"{name} has events of no result", got=sorted(by_index))
