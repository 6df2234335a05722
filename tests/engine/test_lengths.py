"""Drafts as long as they pay: on machines whose clock the work itself moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from everystep.draws import SeededDraws
from everystep.engine import Continuous, DraftModel, Engine, Lockstep, PromptLookup
from everystep.engine.lengths import (
    Costs,
    DraftRecord,
    Lengths,
    best_lengths,
    chances_of,
    note_drafts,
    record_of,
)
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request, Sequence, StepOutput, Work
from everystep.types.request import Drafter
from tests.engine.test_interrupts import Interrupt, Tripwire
from tests.judges.dice import EMBED_DIM
from tests.judges.drive import Drive

VOCABULARY, NEW = 20, 200
IDS = np.array([1, 3, 1, 2, 1, 3])


@dataclass
class Machine:
    """Time passes when something is run."""

    now: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now


class Timed(HashExecutor):
    """Takes so long per run, and per position."""

    def __init__(self, machine: Machine, run: float, position: float, dim: int = EMBED_DIM) -> None:
        super().__init__(VOCABULARY, dim)
        self.machine, self.costs = machine, (run, position)

    def run(self, work: Work) -> StepOutput:
        fed = int(work.counts.sum()) if len(work.rows) else 0
        self.machine.now += (self.costs[0] + self.costs[1] * fed) if fed else 0.0
        return super().run(work)


def request(number: int, drafter: Drafter | None, **more: Any) -> Request:
    length = len(IDS) + NEW
    ids = np.append(IDS, number)
    stops = (MaxLength(length + 1),)
    strategy = Sample() if number % 2 else Greedy()
    found: Request = Request(
        str(number), Prompt(ids), strategy, SeededDraws(number), (), stops, drafter=drafter,
        max_length=length + 1, **more,
    )  # fmt: skip
    return found


def seconds(machine: Machine, drafter: Drafter | None, rows: int) -> tuple[float, Engine, Any]:
    """How long it takes, the engine, and what came out."""
    engine = Engine(Timed(machine, 1.0, 0.05), Lockstep(), clock=machine.clock)
    going, begin = Drive(engine), machine.now
    for number in range(rows):
        going.submit(request(number, drafter))
    going.finish()
    found = [done.tokens.tolist() for group in going.groups.values() for done in group.done]
    return machine.now - begin, engine, found


RIGHT, WRONG = EMBED_DIM, EMBED_DIM - 1


@pytest.mark.parametrize(
    ("rows", "price", "dim"),
    [
        *((1, price, dim) for price in (0.02, 3.0) for dim in (RIGHT, WRONG)),
        *((3, 0.02, RIGHT), (3, 0.4, WRONG)),
    ],
)
def test_drafts_never_cost_more_than_they_gain(rows: int, price: float, dim: int) -> None:
    machine = Machine()
    opened = partial(Timed, machine, price, 0.0, dim)
    plain, _, wanted = seconds(machine, None, rows)
    drafter = DraftModel(opened, 8, "costs")
    drafted, engine, found = seconds(machine, drafter, rows)
    always, _, _ = seconds(machine, DraftModel(opened, 8), rows)
    assert found == wanted
    assert drafted < plain / 0.97
    gained = engine.gained_seconds
    assert abs(plain - drafted - gained) < 0.05 * plain
    if dim == EMBED_DIM and price < 0.1:
        assert drafted < plain / 2  # and nearly as fast as drafting always
        assert drafted < 1.25 * always
    if dim != EMBED_DIM or price > 1:
        assert drafted < always


class Listed(Timed):
    """Remembers how many sequences each run served."""

    def __init__(self, machine: Machine, run: float, position: float, dim: int) -> None:
        super().__init__(machine, run, position, dim)
        self.served: list[int] = []

    def run(self, work: Work) -> StepOutput:
        if len(work.rows):
            self.served.append(len(work.rows))
        return super().run(work)


def test_what_does_not_pay_is_tried_by_one_sequence_now_and_then() -> None:
    machine, opened = Machine(), list[Listed]()

    def wrong() -> Listed:
        opened.append(Listed(machine, 0.3, 0.0, WRONG))
        return opened[0]

    seconds(machine, DraftModel(wrong, 8, "costs"), 6)
    (drafter,) = opened
    assert set(drafter.served) == {1}
    assert 2 <= len(drafter.served) < NEW / 10


def test_a_drafter_is_not_asked_before_it_may_have_become_better() -> None:
    drafter, lengths = PromptLookup(4, schedule="costs"), Lengths()
    lengths.costs.note_step(3, 3, 0.0, 1.0, 0.0)
    lengths.idle[drafter] = 3
    assert not lengths.is_idle(drafter, 3)  # nothing was lost so far
    lengths.costs.note_step(5, 3, 0.0, 1.5, 0.1)
    assert lengths.costs.gained_seconds == pytest.approx(-0.6)
    assert lengths.is_idle(drafter, 3) and not lengths.is_idle(drafter, 2)
    for _ in range(60):
        lengths.costs.note_step(3, 3, 0.0, 1.0, 0.0)
    assert not lengths.is_idle(drafter, 3)
    lengths.forget(drafter)
    assert not lengths.idle


def test_who_has_no_draft_yet_is_taken_to_do_as_the_others_do() -> None:
    good, bad, fresh = DraftRecord(5), DraftRecord(5), DraftRecord(5)
    assert chances_of([fresh], [1]) == [[0.5]]
    for _ in range(20):
        good.note(4, 4)
    (_, [other]) = chances_of([good, fresh], [1, 1])
    assert other > 0.9
    for _ in range(20):
        bad.note(4, 0)
    ([known], _, [other, second]) = chances_of([good, bad, fresh], [1, 1, 2])
    assert known > 0.9 > other > bad.guesses.chance and second == 0.25


def sequences(count: int, drafter: Drafter) -> list[Sequence]:
    return [Sequence(request(number, drafter), number, len(IDS) + 1) for number in range(count)]


def test_what_other_drafters_cost_says_nothing_of_a_new_one() -> None:
    known, fresh = PromptLookup(4, schedule="costs"), PromptLookup(3, schedule="costs")
    lengths = Lengths()
    for fed in range(1, 10):
        lengths.costs.note_step(fed, fed, 0.0, 1.0, 0.0)
    lengths.costs.note_round(known, 1, 1, 0.0)
    for drafter, tried in ((known, [[4], [4]]), (fresh, [[2], [0]])):
        found = lengths.limits(drafter, sequences(2, drafter), [9, 9], [1, 1], 2)
        assert [[min(one, 4) for one in own] for own in found] == tried


@pytest.mark.parametrize(
    ("parent", "accepted", "right"), [(0, 3, None), (1, 2, 0), (2, 1, 1), (0, 0, None)]
)
def test_the_first_of_several_drafts_remembers_which_was_right(
    parent: int, accepted: int, right: int | None
) -> None:
    drafter = PromptLookup(4, alternatives=2)
    own = sequences(3, drafter)
    drafts = [np.arange(4), np.arange(2), np.arange(2)]
    layout = cast(Any, SimpleNamespace(origin=[0, 0, 0], sequences=own, drafts=drafts))
    note_drafts(layout, [parent], [accepted])
    wanted = DraftRecord(drafter.tokens)
    wanted.note(4, accepted if parent == 0 else 0)
    wanted.note_others(2, right)
    assert record_of(own[parent], drafter) == wanted


def test_a_round_costs_what_so_many_sequences_take() -> None:
    """Two sequences whose second guesses are poor are guessed for once, not twice."""
    drafter, costs = PromptLookup(2, schedule="costs"), Costs()
    for fed in range(1, 10):
        costs.note_step(fed, fed, 0.0, 1.0, 0.0)
    costs.note_round(drafter, 1, 1, 0.3)
    costs.note_round(drafter, 2, 1, 0.35)
    # A second sequence adds 0.05 to a round; a second round adds 0.3.
    assert best_lengths(costs, drafter, [[0.6], [0.6]], 2) == [[1], [1]]
    costs.note_round(drafter, 2, 1, 3.0)
    costs.note_round(drafter, 2, 1, 3.0)
    assert best_lengths(costs, drafter, [[0.9], [0.2]], 2) == [[2], [0]]


def test_copies_that_are_never_right_cost_nothing() -> None:
    machine = Machine()
    plain, _, wanted = seconds(machine, None, 2)
    drafted, _, found = seconds(machine, PromptLookup(8, 1, schedule="costs"), 2)
    assert found == wanted and drafted < plain / 0.97


def test_lengths_follow_the_chances_of_each_sequence() -> None:
    drafter = PromptLookup(10, schedule="costs")
    costs = Costs()
    for fed in range(1, 30):
        costs.note_step(fed, fed, 0.0, 1 + 0.02 * fed, 0.0)
    costs.note_round(drafter, 1, 1, 0.0)
    chances = [[0.95], [0.5], [0.02]]
    [sure], [fair], [poor] = best_lengths(costs, drafter, chances, 3)
    assert sure > fair > 0 and poor == 0
    for _ in range(3):
        costs.note_round(drafter, 1, 1, 100.0)
    assert best_lengths(costs, drafter, chances, 3) == [[0], [0], [0]]


def test_an_interrupt_leaves_a_count_measured_or_unmeasured() -> None:
    """At whichever line, the next step with drafts can be judged."""
    whole = Tripwire()
    whole.run(lambda: Costs().note_step(2, 1, 0.0, 1.0, 0.1))
    assert whole.lines > 5
    for at in range(1, whole.lines + 1):
        costs = Costs()
        with pytest.raises(Interrupt):
            Tripwire(at).run(partial(costs.note_step, 2, 1, 0.0, 1.0, 0.1))
        costs.note_step(3, 1, 0.0, 1.0, 0.1)
        assert costs.steps.at(np.array([3])).tolist() == [1.0], at


@pytest.mark.parametrize("position", [0.001, 0.02, 0.2])
def test_several_drafts_are_made_where_each_pays(position: float) -> None:
    """What is chosen gives the most tokens per second of all lengths there are."""
    drafter = PromptLookup(3, schedule="costs", alternatives=2)
    costs = Costs()
    for fed in range(1, 16):
        costs.note_step(fed, fed, 0.0, 1 + position * fed, 0.0)
    costs.note_round(drafter, 1, 1, 0.0)
    first = [0.6, 0.3, 0.05]

    def rate(counts: tuple[int, ...]) -> float:
        tokens = 1 + sum(
            chance * 0.6**place
            for chance, count in zip(first, counts, strict=True)
            for place in range(count)
        )
        fed = 1 + sum(counts) + sum(count > 0 for count in counts[1:])
        return float(tokens / costs.steps.at(np.array([fed]))[0])

    (found,) = best_lengths(costs, drafter, [first], 1)
    best = max(rate(counts) for counts in product(range(4), repeat=3))
    assert rate(tuple(found)) == pytest.approx(best)
    assert (found[1] > 0) == (position < 0.2) and (found[2] > 0) == (position < 0.01)


def test_alternatives_are_believed_as_they_prove_right() -> None:
    record = DraftRecord(5)
    assert record.chances(1) == [0.5] and record.chances(3) == [0.5, 0.25, 0.25]
    for _ in range(20):
        record.note(4, 0)
        record.note_others(2, 1)
    _, never, always = record.chances(3)
    assert never < 0.1 and always > 0.9
    record.note_others(1, 0)
    assert record.chances(3)[1] > never and record.chances(3)[2] == always


def test_what_a_step_takes_is_read_off_its_neighbours() -> None:
    costs = Costs()
    for fed, taken in ((2, 1.0), (2, 1.2), (2, 9.0), (6, 2.0)):
        costs.note_step(fed, fed, 0.0, taken, 0.0)
    assert costs.steps.at(np.array([1, 2, 4, 6, 8])).tolist() == [1.2, 1.2, 1.6, 2.0, 2.4]
    assert (
        costs.steps.knows(2)
        and costs.steps.knows(4)
        and not costs.steps.knows(7)
        and not costs.steps.knows(6)
    )


def test_a_record_fades() -> None:
    record = DraftRecord(5)
    for _ in range(30):
        record.note(4, 4)
    assert record.guesses.chance > 0.9 and record.tokens == 65
    for _ in range(30):
        record.note(4, 0)
    assert record.guesses.chance < 0.15 and record.tokens == 35
    assert record.copy() == record and record.copy() is not record


def test_neighbours_come_and_go() -> None:
    machine = Machine()
    drafter = DraftModel(partial(Timed, machine, 0.02, 0.0), 6, "costs")
    engine = Engine(Timed(machine, 1.0, 0.05), Continuous(64, 4), clock=machine.clock)
    going = Drive(engine)
    for number in range(6):
        going.submit(request(number, drafter if number % 3 else None))
        going.step()
    going.finish()
    _, _, wanted = seconds(machine, None, 6)
    found = [done.tokens.tolist() for group in going.groups.values() for done in group.done]
    assert found == wanted
    assert engine.counts.accepted > 300
