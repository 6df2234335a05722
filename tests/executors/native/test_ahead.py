"""Steps that are begun before they are asked for: no result and no row tells, whatever comes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.cache.formats import CacheDtype
from everystep.draws import SeededDraws
from everystep.engine import Continuous, Engine, Lockstep
from everystep.executors.native import NativeExecutor
from everystep.models import Model
from everystep.processors.warpers import TemperatureLogitsWarper, TopKLogitsWarper
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam, Greedy, Sample
from everystep.types import Past, Prompt, Request, Scores, Verb, Work
from tests.executors.members import members
from tests.executors.models import SPECS, narrow_model, random_model
from tests.judges.drive import Drive

pytestmark = pytest.mark.native
BEST = 3
ALLOCATE = [Verb("allocate", row) for row in range(4)]


def specified(name: str) -> Model:
    return random_model(SPECS[name], dtype=torch.float32)


MODELS = (
    partial(specified, "plain"),
    partial(specified, "window"),
    partial(specified, "rope longrope"),  # turns by the length of a row: nothing can be begun
    partial(narrow_model, "llama", "int8"),
    partial(narrow_model, "qwen3_moe", "int8"),
    partial(narrow_model, "mamba", "int8"),
)
SEEDS = [  # by default, one for each model
    *range(len(MODELS)),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(len(MODELS), 12)),
]


def pair(model: Model, cache_dtype: CacheDtype = "float32", count: int = 3) -> Any:
    """One executor that runs ahead with so many threads, and one that does not, with one."""
    with members(count):
        ahead = NativeExecutor(model, cache_dtype)
    with members(1):
        return ahead, NativeExecutor(model, cache_dtype, ahead=False)


def work_of(feeds: dict[int, tuple[int, list[int]]], verbs: list[Verb], **more: Any) -> Work:
    """Row -> where it is fed and with what; the best of each feed's last position are wanted."""
    rows = np.array([*feeds], dtype=np.int64)
    starts = np.array([start for start, _ in feeds.values()], dtype=np.int64)
    counts = np.array([len(ids) for _, ids in feeds.values()], dtype=np.int64)
    tokens = np.array([id for _, ids in feeds.values() for id in ids], dtype=np.int64)
    ones = np.ones_like(rows)
    return Work(tuple(verbs), rows, starts, counts, ones, tokens, best=BEST * ones, **more)


@dataclass
class Walk:
    """Random works for two executors, most of which feed what the last one said is likely."""

    ahead: NativeExecutor
    judge: NativeExecutor
    rng: np.random.Generator
    lengths: dict[int, int] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)  # how far a row can be cut back
    likely: dict[int, int] = field(default_factory=dict)
    verbs: list[Verb] = field(default_factory=list)
    pasts: dict[int, Past] = field(default_factory=dict)
    earlier: tuple[Scores, Tensor] | None = None

    def step(self) -> None:
        self.verbs, self.pasts = [], {}
        while self.rng.random() < 0.15 or not self.lengths:
            self._change()
        self._run()

    def _change(self) -> None:
        free = [row for row in range(12) if row not in self.lengths]
        row = int(self.rng.choice([*self.lengths])) if self.lengths else -1
        change = self.rng.choice(["allocate", "fork", "truncate", "free", "past"])
        if change == "truncate" and row >= 0 and self.lengths[row] > 1:
            least = max(1, self.floors.get(row, 0))
            self.lengths[row] = int(self.rng.integers(least, self.lengths[row] + 1))
            self.verbs.append(Verb("truncate", row, self.lengths[row]))
        elif change == "free" and len(self.lengths) > 1:
            del self.lengths[row]
            self.verbs.append(Verb("free", row))
            self.pasts.pop(row, None)
        elif change == "fork" and free and row >= 0:
            self.lengths[free[0]] = self.lengths[row]
            self.floors[free[0]] = self.floors.get(row, 0)
            self.likely[free[0]] = self.likely.get(row, 0)
            self.verbs.append(Verb("fork", free[0], row))
        elif change == "allocate" and free:
            self.lengths[free[0]] = self.floors[free[0]] = 0
            self.verbs.append(Verb("allocate", free[0]))
        elif change == "past" and row >= 0 and not self.verbs:
            # The row's own contents, in the place of a row that was there before.
            past = self.ahead.export(row)
            self.verbs += [Verb("free", row), Verb("allocate", row)]
            self.pasts[row] = past
            self._cannot_go_below(row, past.length)

    def _cannot_go_below(self, row: int, length: int) -> None:
        if "cut" not in self.judge.abilities:
            self.floors[row] = length

    def _ids(self, row: int) -> list[int]:
        draw = self.rng.random()
        if self.lengths[row] and draw < 0.85:
            return [self.likely.get(row, 0)]
        return self.rng.integers(0, 40, 1 if draw < 0.92 else 1 + int(draw * 17)).tolist()

    def _run(self) -> None:
        fed = [row for row in self.lengths if self.rng.random() < 0.9 or not self.lengths[row]]
        feeds = {row: (self.lengths[row], self._ids(row)) for row in fed}
        totals, whole = (self.rng.random(2) < 0.5).tolist()
        work = work_of(feeds, self.verbs, pasts=self.pasts, totals=totals, whole=whole)
        if fed and self.rng.random() < 0.1:
            work = replace(work, best=work.best * (np.arange(len(fed)) % 2))  # type: ignore[operator]
        found, wanted = self.ahead.run(work), self.judge.run(work)
        for row, (start, ids) in feeds.items():
            self.lengths[row] = start + len(ids)
            self._cannot_go_below(row, self.lengths[row] - 1)
        assert torch.equal(found.logits, wanted.logits)
        if wanted.best is None:
            return
        assert found.best is not None
        assert np.array_equal(found.best.values, wanted.best.values)
        assert np.array_equal(found.best.tokens, wanted.best.tokens)
        assert (found.best.totals is None) == (wanted.best.totals is None)
        if wanted.best.totals is not None:
            assert np.array_equal(found.best.totals, wanted.best.totals)  # type: ignore[arg-type]
        # Rows are read whole while threads are ahead, and also after the step that follows.
        rows = found.best.whole().values
        assert (found.best_rows is None) == (not work.whole)
        assert found.best_rows is None or torch.equal(found.best_rows, rows)
        assert torch.equal(rows, wanted.best.whole().values)
        assert torch.equal(rows.gather(1, found.best.tokens), found.best.values)
        if self.earlier is not None:
            assert torch.equal(self.earlier[0].whole().values, self.earlier[1])
        self.earlier = found.best, rows
        told = [row for row, best in zip(fed, work.best.tolist(), strict=True) if best]  # type: ignore[union-attr]
        self.likely.update(zip(told, wanted.best.tokens[:, 0].tolist(), strict=True))

    def check_rows(self) -> None:
        for row in self.lengths:
            found, wanted = self.ahead.export(row), self.judge.export(row)
            assert found.length == wanted.length
            for layers in zip(found.layers, wanted.layers, strict=True):
                assert all(map(torch.equal, *layers))


@pytest.mark.parametrize("cache_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_results_and_rows_are_the_same(seed: int, cache_dtype: CacheDtype) -> None:
    ahead, judge = pair(MODELS[seed % len(MODELS)](), cache_dtype, 2 + seed % 3)
    walk = Walk(ahead, judge, np.random.default_rng(seed))
    for step in range(120):
        walk.step()
        if step % 10 == 9:
            walk.check_rows()
    made, true_ones = ahead.guesses()
    assert (0 < true_ones <= made) == (seed % len(MODELS) != 2)


# --- the engine ---------------------------------------------------------------------------------


def request(index: int, strategy: Any, processors: tuple[Any, ...] = (), new: int = 60) -> Request:
    ids = np.random.default_rng(index).integers(0, 40, 1 + 5 * index)
    return Request(
        request_id=str(index),
        prompt=Prompt(ids=ids),
        strategy=strategy,
        draws=SeededDraws(index),
        processors=processors,
        stops=(EosToken((39,)), MaxLength(len(ids) + new)),
        max_length=len(ids) + new,
    )


WARPED = (TemperatureLogitsWarper(0.3), TopKLogitsWarper(5))
MIXED = [Greedy(), Sample(), Beam(3), Greedy(), Sample(), Greedy()]


@pytest.mark.parametrize("scheduler", [Lockstep, partial(Continuous, 40, 12, 200)])
def test_requests_of_all_kinds_together_end_the_same(scheduler: Any) -> None:
    results = []
    for executor in pair(specified("plain")):
        run = Drive(Engine(executor, scheduler()))
        for index, strategy in enumerate(MIXED):
            run.submit(request(index, strategy, WARPED if isinstance(strategy, Sample) else ()))
        results.append(run.finish().results)
        assert executor.rows.pool.in_use == 0
    assert results[0] == results[1]


@pytest.mark.parametrize("indices", [(1,), (1, 2, 3)])
def test_greedy_steps_are_what_was_begun(indices: tuple[int, ...]) -> None:
    """Also where rows, each at another step, go on in another page."""
    ahead, _ = pair(specified("plain"), count=2)
    run = Drive(Engine(ahead, Lockstep()))
    for index in indices:
        asked = request(index, Greedy(), new=64)
        run.submit(replace(asked, stops=(MaxLength(asked.max_length),)))
    run.finish()
    steps = run.engine.counts.forwards
    made, true_ones = ahead.guesses()
    assert true_ones >= steps - 2
    assert made <= steps
    assert made - true_ones <= 1


def test_guesses_that_do_not_come_true_become_few() -> None:
    ahead, _ = pair(specified("plain"), count=2)
    run = Drive(Engine(ahead, Lockstep()))
    for index in range(8):
        run.submit(
            request(index, Sample(), (TemperatureLogitsWarper(50.0), TopKLogitsWarper(30)), 80)
        )
    run.finish()
    made, true_ones = ahead.guesses()
    assert true_ones == 0 and made < run.engine.counts.forwards // 3


def test_rows_that_end_leave_the_others_what_was_begun_for_them() -> None:
    ahead, judge = pair(specified("plain"))
    prompts = {row: (0, [row + 1, 7, 9 + row]) for row in range(4)}
    opening = work_of(prompts, ALLOCATE)
    likely = judge.run(opening).best.tokens[:, 0].tolist()
    ahead.run(opening)
    rest = work_of({row: (3, [likely[row]]) for row in (1, 3)}, [Verb("free", 0), Verb("free", 2)])
    found, wanted = ahead.run(rest).best, judge.run(rest).best
    assert np.array_equal(found.values, wanted.values) and ahead.guesses()[1] == 1


@pytest.mark.parametrize("way", ["fork", "past"])
def test_a_row_that_became_another_is_computed_anew(way: str) -> None:
    ahead, judge = pair(specified("plain"))
    opening = work_of({0: (0, [1, 2, 3]), 1: (0, [30, 9, 9])}, ALLOCATE[:2])
    found = [executor.run(opening).best for executor in (judge, ahead)]
    time.sleep(0.05)  # what was begun is over
    # Row 0 is fed what is likely for it, at the same position, and yet holds what row 1 held.
    feeds = {0: (3, [int(found[0].tokens[0, 0])])}
    if way == "fork":
        after = work_of(feeds, [Verb("free", 0), Verb("fork", 0, 1), Verb("free", 1)])
    else:
        after = work_of(feeds, [Verb("free", 0), ALLOCATE[0]], pasts={0: judge.export(1)})
    assert np.array_equal(ahead.run(after).best.values, judge.run(after).best.values)


# --- its end --------------------------------------------------------------------------------------


def begun() -> NativeExecutor:
    """An executor whose threads are at work on what nobody asked for."""
    ahead, _ = pair(specified("plain"))
    ahead.run(work_of({0: (0, [1, 2, 3])}, ALLOCATE[:1]))
    assert ahead.guesses() == (1, 0)
    return ahead


def test_an_executor_that_goes_away_ends_what_was_begun() -> None:
    executor = begun()
    del executor
    gc.collect()


def test_a_work_without_feeds_ends_what_was_begun() -> None:
    executor = begun()
    executor.run(work_of({}, [Verb("free", 0)]))
    assert executor.guesses() == (1, 0)
    executor.run(work_of({0: (0, [1, 2, 3])}, ALLOCATE[:1]))
    assert executor.guesses() == (2, 0)


def test_without_another_thread_or_by_choice_nothing_is_begun() -> None:
    for executor in (pair(specified("plain"), count=1)[0], pair(specified("plain"))[1]):
        executor.run(work_of({0: (0, [1, 2, 3])}, ALLOCATE[:1]))
        assert executor.guesses() == (0, 0)
