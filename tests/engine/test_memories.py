"""What is remembered, and by whom: strategies write nothing, interrupts lose and repeat nothing,
drafters hold no row too many, a generation that is restored draws as before.

Every check is also asked of the engine with a named defect, which it must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from everystep.engine import Continuous, DraftModel, Engine, Lockstep, audit
from everystep.engine.batches import Scored
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import (
    Children,
    Group,
    Prompt,
    Request,
    Sequence,
    StepOutput,
    TokenTable,
    Wants,
    Work,
    values_of,
)
from tests.engine.mutants import MUTANTS
from tests.executors.requests import REQUESTS, ids, request
from tests.judges.drive import Drive, run_together


class Interrupt(BaseException):
    """What is raised in the middle."""


def run_of(requests: Iterable[Request], executor: HashExecutor) -> Drive:
    run = Drive(Engine(executor, Continuous(token_budget=64, max_rows=64)))
    for one in requests:
        run.submit(one)
    return run


def endless(name: str, strategy: Any, prompt: Prompt, length: int = 99) -> Request:
    """A request that nothing ends but the length of its row."""
    return replace(request(name, strategy, prompt), stops=(MaxLength(length),), max_length=length)


def fake() -> HashExecutor:
    return HashExecutor(40, 32)


# --- a strategy writes nothing --------------------------------------------------------------------


def state_of(group: Group, sequences: list[Sequence]) -> list[Any]:
    """All that a strategy could write to, but for memories of prefixes."""
    found: list[Any] = [list(group.live), list(group.done)]
    owners: list[Group | Sequence] = [group, *sequences]
    for owner in owners:
        kept = [one.name for one in fields(owner) if one.name not in ("live", "done", "memo")]
        found.append({name: getattr(owner, name) for name in kept})
    found += [values_of(sequence.memo) for sequence in sequences]
    return found


def strategies_write_nothing() -> None:
    true_select = Scored.select
    selected = set()

    def watched(scored: Scored, picked: Any) -> Children:
        def seen() -> list[Any]:
            every = scored.layout.sequences + scored.batch.sequences
            owners = [(group, every) for group in scored.groups]
            return [state_of(*owner) for owner in owners]

        before = seen()
        children = true_select(scored, picked)
        assert seen() == before
        selected.add(type(scored.groups[0].request.strategy))
        return children

    with mock.patch.object(Scored, "select", watched):
        run_together(REQUESTS, fake())
    assert len(selected) == 4


# --- an interrupt at one place --------------------------------------------------------------------


def interrupted(run: Drive, owner: Any, name: str, call: int) -> None:
    """The run goes to its end; the given call of `owner.name` is interrupted after it is done."""
    true_call, calls = getattr(owner, name), 0

    def cut(*given: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        found = true_call(*given, **named)
        if calls == call:
            raise Interrupt
        return found

    with mock.patch.object(owner, name, cut):
        while run.engine.pending:
            with suppress(Interrupt):
                run.step()
    assert calls >= call
    run.finish()  # whose events must spell the results


def survives(owner: type, name: str, calls: tuple[int, ...]) -> None:
    """Interrupts in these calls of a method change no result."""
    expected = run_together(REQUESTS, fake()).results
    for call in calls:
        run = run_of(REQUESTS, fake())
        interrupted(run, owner, name, call)
        assert run.results == expected


def interrupts_lose_no_event() -> None:
    """They fall between the moment at which a step happens and that at which it is reported."""
    survives(TokenTable, "close", (1, 3, 6))


def a_step_happens_for_all_or_for_none() -> None:
    """The interrupts fall between the choices of different strategies."""
    survives(Scored, "select", (2, 5, 11))


# --- drafters -------------------------------------------------------------------------------------


def drafters_hold_no_row_too_many() -> None:
    drafter = DraftModel(fake, 3)
    prompts = [Prompt(ids(seed, 6)) for seed in (31, 32)]
    asked = [request("", Greedy(), prompts[0]), request("drawn", Sample(2), prompts[1])]
    run = run_of([*REQUESTS, *(replace(one, drafter=drafter) for one in asked)], fake())
    most = 0
    while run.engine.pending:
        run.step()
        audit(run.engine)
        most = max(most, run.engine.guests.held())
    assert most > 0 and run.engine.guests.held() == 0


# --- wants ----------------------------------------------------------------------------------------


class Watched(HashExecutor):
    """The fake model, with every work that it was given."""

    def __init__(self) -> None:
        super().__init__(40)
        self.works: list[Work] = []

    def run(self, work: Work) -> StepOutput:
        self.works.append(work)
        return super().run(work)


def a_want_is_its_requests_own() -> None:
    executor = Watched()
    engine = Engine(executor, Lockstep())
    asking = replace(request("asking", Greedy(), Prompt(ids(1, 5))), wants=Wants(layers=True))
    asking, plain = (
        replace(one, stops=()) for one in (asking, request("", Greedy(), Prompt(ids(2, 3))))
    )
    groups = [engine.submit(asking), engine.submit(plain)]
    for _ in range(3):
        engine.step()
        own, other = (group.live[0].row for group in groups)
        work = executor.works[-1]
        assert work.rows.tolist() == [own, other]
        assert {f: extra.layers for f, extra in work.extras.items()} == {0: True}


# --- draws ----------------------------------------------------------------------------------------


def restored_draws_go_on() -> None:
    """Into an engine with other requests, after every number of steps."""
    asked = endless("drawn", Sample(3), Prompt(ids(4, 9)), 17)
    expected = run_together([asked], fake()).results["drawn"]
    assert len({one.tokens for one in expected}) == 3
    for steps in range(1, 8, 2):
        before = run_of([asked], fake())
        for _ in range(steps):
            before.step()
        after = run_of(REQUESTS[:2], fake())
        data = before.engine.dump(before.groups["drawn"])
        after.groups["drawn"] = after.engine.restore(asked, data)
        while after.engine.pending:
            after.engine.step()
        assert after.results["drawn"] == expected


def draws_follow_from_where_they_stand() -> None:
    """A prompt with the first tokens of an answer is continued as the answer went on."""
    asked = endless("whole", Sample(), Prompt(ids(4, 9)), 21)
    (whole,) = run_together([asked], fake()).results["whole"]
    for known in (1, 4, 11):
        prompt = np.concatenate([ids(4, 9), np.array(whole.tokens[:known])])
        later = replace(asked, prompt=Prompt(prompt))
        (rest,) = run_together([later], fake()).results["whole"]
        assert rest.tokens == whole.tokens[known:]


KILLERS: dict[str, Callable[[], None]] = {
    "select that writes": strategies_write_nothing,
    "select that writes to its group": strategies_write_nothing,
    "event lost": interrupts_lose_no_event,
    "apply before all selected": a_step_happens_for_all_or_for_none,
    "drafter row leaked": drafters_hold_no_row_too_many,
    "want that switches a neighbour": a_want_is_its_requests_own,
    "restored draw out of step": restored_draws_go_on,
    "draws counted from the end of the prompt": draws_follow_from_where_they_stand,
}


@pytest.mark.parametrize("check", list(dict.fromkeys(KILLERS.values())))
def test_without_defects(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_killed(name: str) -> None:
    with MUTANTS[name](), pytest.raises(AssertionError):
        KILLERS[name]()
