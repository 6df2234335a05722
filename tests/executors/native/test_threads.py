"""Several threads on one model, and steps that are cut short, refused, or nested."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import InvariantError, RequestError
from everystep.executors import native
from everystep.executors.choice import ExecutorName
from everystep.executors.native import NativeExecutor
from everystep.executors.native.program import program_of
from everystep.models import Model
from everystep.types import StepOutput, Verb, Work
from tests.executors.members import members
from tests.executors.models import PLAIN, random_model

pytestmark = pytest.mark.native
THREADS = 8
IDS = list(range(3, 12))


def tiny() -> Model:
    return random_model(PLAIN, dtype=torch.float32)


def feed(rows: int, start: int, count: int) -> Work:
    """The same number of tokens for every row; rows begin to exist at position 0."""
    each = np.ones(rows, np.int64)
    verbs = () if start else tuple(Verb("allocate", row) for row in range(rows))
    tokens = np.random.default_rng(start).integers(0, 40, rows * count)
    return Work(verbs, np.arange(rows), start * each, count * each, each, tokens)


def freed(executor: NativeExecutor) -> Work:
    nothing = np.zeros(0, np.int64)
    verbs = tuple(Verb("free", row) for row in executor.audit())
    return Work(verbs, nothing, nothing, nothing, nothing, nothing)


def in_threads(ask: Callable[[int], object]) -> list[object]:
    """The answers of threads that all begin at once."""
    start = threading.Barrier(THREADS)

    def at_once(number: int) -> object:
        start.wait()
        return ask(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(at_once, range(THREADS)))


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_threads_get_what_calling_in_turn_gives(executor: ExecutorName) -> None:
    model = LanguageModel(tiny(), executor=executor)

    def ask(number: int) -> object:
        options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "seed": number}
        if number % 4 == 0:
            return model.generate(torch.tensor([IDS]), **options).tolist()
        if number % 4 == 1:
            return es.generate(model, None, [IDS, IDS[number:]], **options)
        if number % 4 == 2:
            return model.generate(torch.tensor([IDS]), max_new_tokens=20, num_beams=3).tolist()
        with es.stream(model, None, IDS, **options) as stream:
            return [event.token for event in stream]

    with members(2):
        assert in_threads(ask) == list(map(ask, range(THREADS)))


def test_weights_are_packed_once_whoever_comes_first() -> None:
    model = tiny()
    assert len({*in_threads(lambda number: program_of(model))}) == 1


def test_a_step_changes_no_setting_of_torch() -> None:
    """Not for a thread that first meets torch meanwhile, nor for its own thread afterwards."""
    model, seen = LanguageModel(tiny(), executor="native"), []

    def settings() -> None:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        seen.append((torch.get_num_threads(), grad, inference))

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        fresh = threading.Thread(target=settings)
        fresh.start()
        fresh.join()
        return scores

    with members(2):
        model.generate(torch.tensor([IDS]), max_new_tokens=4, logits_processor=[processor])
        settings()
    assert set(seen) == {(2, True, False)}


class Interruption:
    """A trace function that raises at the k-th line of the executor's own modules."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(native.__name__):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self


def interrupted(executor: NativeExecutor, work: Work, line: int) -> bool:
    """Whether a run was interrupted at its k-th line."""
    before = sys.gettrace()
    sys.settrace(Interruption(line))
    try:
        executor.run(work)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_after_an_interrupt_at_any_line_results_are_the_same() -> None:
    model = tiny()
    # Fewer ids than the first room for them, and more; a fork that shares a page.
    works = [feed(2, 0, 20), feed(2, 20, 1), feed(2, 21, 300), feed(2, 321, 1)]
    works[1] = Work((Verb("free", 1), Verb("fork", 1, 0)), *(works[1].__getstate__()[1:6]))
    with members(2):
        untouched = NativeExecutor(model)
        expected = [untouched.run(work).logits for work in works]
        for place in range(len(works)):
            line, executor = 0, NativeExecutor(model)
            while True:
                for work in works[:place]:
                    executor.run(work)
                if not interrupted(executor, works[place], line):
                    break
                executor.run(freed(executor))
                assert executor.rows.pool.in_use == 0
                line += 1 if place else 3
                for work, logits in zip(works, expected, strict=True):
                    assert torch.equal(executor.run(work).logits, logits)
                executor.run(freed(executor))
            assert line > 50


class Nested(NativeExecutor):
    """Steps within a step, once."""

    inner = True

    def _output(self, work: Work) -> StepOutput:
        if self.inner:
            self.inner = False
            self.run(work)
        return super()._output(work)


def test_a_step_inside_a_step_is_refused_and_the_next_one_works() -> None:
    executor, plain = Nested(tiny()), NativeExecutor(tiny())
    with pytest.raises(RequestError, match="inside another step"):
        executor.run(feed(1, 0, 4))
    assert torch.equal(executor.run(feed(1, 0, 4)).logits, plain.run(feed(1, 0, 4)).logits)


def test_a_row_without_its_pages_is_an_error() -> None:
    executor = NativeExecutor(tiny())
    executor.run(feed(1, 0, 16))
    executor.rows.table[0, 0] = 10**6
    with pytest.raises(InvariantError, match="does not exist"):
        executor.run(feed(1, 16, 1))


@pytest.mark.parametrize("place", [-1, 10**6, 2**31 - 1])
def test_a_position_beyond_its_table_is_an_error(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = NativeExecutor(tiny())
    executor.run(feed(1, 0, 16))
    (table,) = executor._tables
    far = table._turned(table._tables, np.full(1, place, np.int32))
    with monkeypatch.context() as patch:
        patch.setattr(table, "rows", lambda *given: far)
        with pytest.raises(InvariantError, match="does not exist"):
            executor.run(feed(1, 16, 1))
    assert executor.run(feed(1, 17, 1)).logits.isfinite().all()
