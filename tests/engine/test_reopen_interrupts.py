"""A fork or a replacement happens or it does not: an interrupt at any line of it loses nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from everystep.engine import Beginning, Continuous, Engine, Lockstep, Turns, audit
from everystep.engine.schedule import Scheduler
from everystep.types import Group, Request
from tests.engine.test_interrupts import Interrupt, Tripwire
from tests.engine.test_reopen import finished, single
from tests.judges.drive import hash_executor
from tests.judges.mixes import Mix, random_mix

MOST = 3_000
OFTEN = [pytest.param(41, id="sampled"), pytest.param(1, id="all", marks=pytest.mark.slow)]


def continuous() -> Scheduler:
    return Continuous(token_budget=64, max_rows=64)


@dataclass(frozen=True)
class Scene:
    """A request that has taken some steps, with neighbours; `over`: it has taken all."""

    mix: Mix
    request: Request
    steps: int
    over: bool = False
    scheduler: Callable[[], Scheduler] = continuous

    def begun(self) -> tuple[Engine, Group, list[Group]]:
        """An engine with the group at work, and its neighbours."""
        engine = Engine(hash_executor(self.mix), self.scheduler())
        group = engine.submit(self.request)
        others = [one for one in self.mix.requests if one.request_id != self.request.request_id]
        near = [engine.submit(one) for one in others[:1]]
        for _ in range(self.steps):
            engine.step()
        if self.over:
            finished(engine, group)
        return engine, group, near

    def turn(self, engine: Engine, group: Group) -> Any:
        """What the group comes to."""
        if isinstance(engine.scheduler, Turns):
            engine.scheduler.turn = group
        return finished(engine, group)


def interrupted(scene: Scene, call: Callable[[Engine, Group], object], often: int) -> Iterator[Any]:
    """An engine, its group and its neighbours, after a call that was cut short at some line; every
    `often`-th line is one."""
    at = 1
    while at < MOST:
        engine, group, near = scene.begun()
        try:
            Tripwire(at).run(partial(call, engine, group))
            return
        except Interrupt:
            yield engine, group, near
        at += often
    raise AssertionError("the call never ends")


def mixes(count: int, fits: Callable[[Request], bool]) -> list[tuple[Mix, Request]]:
    """The first mixes of several requests of which one fits, and that one."""
    found: list[tuple[Mix, Request]] = []
    for mix in map(random_mix, range(200)):
        request = next((one for one in mix.requests if fits(one)), None)
        if request is not None and len(mix.requests) > 1:
            found.append((mix, request))
        if len(found) == count:
            break
    return found


def lasting(request: Request) -> bool:
    """Whether the request still lives after three steps."""
    return request.max_length - request.prompt.length > 5


SCENES = {
    f"{number}-{name}": Scene(mix, request, steps, scheduler=scheduler)
    for number, (mix, request) in enumerate(mixes(4, lasting))
    for name, steps, scheduler in (
        ("before a step", 0, continuous),
        ("continuous", 3, continuous),
        ("lockstep", 2, Lockstep),
    )
}


@pytest.mark.parametrize("often", OFTEN)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_a_fork_that_was_cut_short_can_be_made_again(scene: Scene, often: int) -> None:
    def fork(engine: Engine, group: Group) -> Group:
        return engine.fork(group, replace(group.request, request_id="twin"))

    engine, group, near = scene.begun()
    if not group.live:
        return
    expected = [finished(engine, one) for one in (group, *near)]
    for engine, group, near in interrupted(scene, fork, often):
        twin = fork(engine, group)
        audit(engine)
        names = [one.request.request_id for one in engine.scheduler.groups]
        assert len(names) == len(set(names))
        assert finished(engine, twin) == expected[0]
        assert [finished(engine, one) for one in (group, *near)] == expected
        assert engine.executor.audit() == {} and engine.table.open_lines == 0


@pytest.mark.parametrize("often", OFTEN)
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())
def test_a_fork_that_was_cut_short_has_not_happened(scene: Scene, often: int) -> None:
    """Who goes on without it finds no group that nobody asked for."""
    engine, group, near = scene.begun()
    if not group.live:
        return
    expected, count = [finished(engine, one) for one in (group, *near)], engine._submitted
    for engine, group, near in interrupted(
        scene, lambda e, g: e.fork(g, replace(g.request, request_id="twin")), often
    ):
        engine.recover()
        assert {id(one) for one in engine.scheduler.groups} <= {id(one) for one in (group, *near)}
        assert engine._submitted == count
        assert [finished(engine, one) for one in (group, *near)] == expected
        assert not engine.pending and engine.executor.audit() == {}


def kept(request: Request) -> Request:
    return replace(request, max_length=request.max_length + 20, linger=True, keeps=True)


REPLACED = {
    f"{number}-{name}": Scene(mix, how(request), steps, over, scheduler)
    for number, (mix, request) in enumerate(mixes(3, lambda one: single(one) and lasting(one)))
    for name, how, steps, over, scheduler in (
        ("at work", kept, 3, False, continuous),
        ("lingers", kept, 0, True, continuous),
        ("over", lambda one: one, 0, True, continuous),
        ("its turn", kept, 0, False, Turns),
    )
}


def wanted(scene: Scene) -> tuple[Request, Callable[[Engine, Group], None]]:
    """A request, and the call that makes the group one of it, which goes on after other ids."""
    request, tokens = kept(scene.request), np.arange(3) % scene.mix.vocab_size
    return request, lambda engine, group: engine.replace(group, request, Beginning(tokens))


@pytest.mark.parametrize("often", OFTEN)
@pytest.mark.parametrize("scene", REPLACED.values(), ids=REPLACED.keys())
def test_a_replacement_that_was_cut_short_can_be_made_again(scene: Scene, often: int) -> None:
    _, call = wanted(scene)
    engine, group, near = scene.begun()
    call(engine, group)
    expected = [scene.turn(engine, one) for one in (group, *near)]
    for engine, group, near in interrupted(scene, call, often):
        call(engine, group)
        audit(engine)
        assert [scene.turn(engine, one) for one in (group, *near)] == expected
        engine.cancel(group)
        audit(engine)
        assert engine.executor.audit() == {} and engine.table.open_lines == 0


@pytest.mark.parametrize("often", OFTEN)
@pytest.mark.parametrize("scene", REPLACED.values(), ids=REPLACED.keys())
def test_a_replacement_that_was_cut_short_happened_or_did_not(scene: Scene, often: int) -> None:
    """Who goes on without it gets the result of before, or that of what the group became."""
    request, call = wanted(scene)
    engine, group, _ = scene.begun()
    waits = group in engine.scheduler.groups
    before = scene.turn(engine, group)
    engine, group, _ = scene.begun()
    call(engine, group)
    after = scene.turn(engine, group)
    for engine, group, near in interrupted(scene, call, often):
        engine.recover()
        happened = group.request is request
        assert (group in engine.scheduler.groups) == (waits or happened)
        assert scene.turn(engine, group) == (after if happened else before)
        for one in near:
            scene.turn(engine, one)
        engine.cancel(group)
        assert not engine.pending and engine.executor.audit() == {}
