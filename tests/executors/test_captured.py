"""Steps that are captured give what the same steps give one operator after another.

Here a capture keeps what runs the step, and a replay runs it again on the numbers that lie there
then: the arithmetic of a graph without a GPU. Tests marked `cuda` capture graphs.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everystep.executors.captured import (
    Capture,
    CaptureCounts,
    CudaCapture,
    Replay,
    can_be_captured,
    kept_steps,
)
from everystep.executors.choice import chosen, open_executor
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, convert_model
from everystep.types import Extra, Verb, Work
from tests.executors.models import SPECS, family_model, random_model
from tests.executors.works import Wanderer, expected_logits, ints, one_feed, only_verbs
from tests.judges.laws import Laws
from tests.judges.mixes import random_mix
from tests.laws.test_executors import for_decoder

CAPTURED = ("plain", "window", "capped scores")
OPEN = Verb("allocate", 0)


@cache
def model_of(name: str) -> Model:
    return random_model(SPECS[name])


def rerun(step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
    """Capture nothing: a replay runs the step again, and puts its result where it was."""
    out = step()
    return lambda: out.copy_(step()), out


def rerunning(device: torch.device) -> Capture:
    return rerun


def of_captured(model: Model) -> TorchExecutor:
    """An executor that replays whatever may be, and has captured nothing yet."""
    kept_steps(model, (rerunning, None))
    return TorchExecutor(model, capture=rerunning)


def wander(
    wanderer: Wanderer, model: Model, executor: TorchExecutor, steps: int, error: float
) -> None:
    """Works of which most feed one id to some rows, each with the right logits and rows."""
    for step in range(steps):
        wanderer.most = 9 if step % 5 == 0 else 1
        work = wanderer.work()
        found = executor.run(work).logits.cpu()
        wanted = expected_logits(wanderer.model, work, wanderer.histories)
        torch.testing.assert_close(found, wanted.to(found.dtype), rtol=error, atol=error)
        held = {row: len(history.positions) for row, history in wanderer.histories.items()}
        assert executor.audit() == held


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("name", CAPTURED)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5)
def test_rows_hold_what_they_have_read(name: str, positions: bool, seed: int) -> None:
    model, rng = model_of(name), np.random.default_rng(seed)
    wanderer = Wanderer(model, rng, positions, 90, anywhere=name != "window", plain=True)
    wander(wanderer, model, of_captured(model), 40, 1e-9)


@pytest.mark.parametrize("name", SPECS)
def test_every_specification_is_captured_or_left_alone(name: str) -> None:
    model, seed = model_of(name), 5
    executor = of_captured(model)
    scaled = [one.rope for one in SPECS[name].layers if one.rope is not None]
    by_length = any(rope.scaling.by_length for rope in scaled)
    wanderer = Wanderer(model, np.random.default_rng(seed), False, 16 if by_length else 60)
    wanderer.anywhere, wanderer.plain = False, True
    wander(wanderer, model, executor, 30, 1e-9)
    counts, experts = executor.captures, any(one.experts for one in SPECS[name].layers)
    if by_length or experts:
        assert counts == CaptureCounts()
    else:
        assert counts.captured > 0 and counts.replayed > counts.captured


def test_steps_are_replayed_from_their_shape_s_second_on() -> None:
    executor = of_captured(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    for start in range(3, 63):
        executor.run(one_feed([4], start=start))
    # 62 positions fit into the first size; the prompt is a step of another kind.
    assert executor.captures == CaptureCounts(first=1, captured=1, replayed=59, other=1)
    for start in range(63, 70):
        executor.run(one_feed([4], start=start))
    # The 64th is the last of that size. More need other memory, whose addresses no graph has.
    assert executor.captures == CaptureCounts(first=2, captured=2, replayed=65, other=1)


@pytest.mark.parametrize(
    ("name", "most", "captured"),
    [("_MOST_STEPS", 64, 3), ("_MOST_STEPS", 2, 4), ("_MOST_RESULT_BYTES", 1000, 5)],
)
def test_the_sizes_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int, captured: int
) -> None:
    """Results of 4, 2 and 1 rows have 1,280, 640 and 320 bytes."""
    monkeypatch.setattr(f"everystep.executors.captured.{name}", most)
    executor = of_captured(model_of("plain"))
    lengths: dict[int, int] = {}
    for rows in (4, 2, 1, 4, 1):
        for _ in range(3):
            verbs = [Verb("free", row) for row in lengths if row >= rows]
            verbs += [Verb("allocate", row) for row in range(rows) if row not in lengths]
            starts = [lengths.get(row, 0) for row in range(rows)]
            ones, ids = ints(*[1] * rows), ints(*range(rows))
            executor.run(Work(tuple(verbs), ids, ints(*starts), ones, ones, ids + 1))
            lengths = {row: start + 1 for row, start in enumerate(starts)}
    assert executor.captures.captured == executor.captures.first == captured
    assert executor.captures.replayed == 15 - captured


def test_logits_that_are_held_stay_as_they_are() -> None:
    executor = of_captured(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    held = [executor.run(one_feed([start], start=start)).logits for start in range(3, 9)]
    assert len({tuple(one[0].tolist()) for one in held}) == 6


def test_memory_that_moves_is_captured_anew() -> None:
    """A graph reads addresses, which no test on the CPU can see: that it is made again, it can."""
    executor = of_captured(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    for start in range(3, 6):
        executor.run(one_feed([4], start=start))
    assert executor.captures == CaptureCounts(first=1, captured=1, replayed=2, other=1)
    second = (Verb("allocate", 1), Verb("allocate", 2))  # needs more lines
    executor.run(Work(second, ints(1, 2), ints(0, 0), ints(2, 2), ints(1, 1), ints(1, 2, 1, 2)))
    executor.run(only_verbs(Verb("free", 1), Verb("free", 2)))
    for start in range(6, 9):
        executor.run(one_feed([4], start=start))
    assert executor.captures == CaptureCounts(first=2, captured=2, replayed=4, other=2)


def test_what_lines_without_a_feed_write_is_nobody_s() -> None:
    """They read id 0, which is broken here; masked or not, nan times zero is nan."""
    model = family_model("llama")
    model.network.table[0] = torch.nan  # type: ignore[index]
    executor, plain = of_captured(model), TorchExecutor(model)
    opened = tuple(Verb("allocate", row) for row in range(3))
    one, three = ints(1), ints(1, 1, 1)
    works = [
        Work(opened, ints(0, 1, 2), ints(0, 0, 0), three, three, ints(5, 6, 7)),
        *(Work((), ints(0), ints(start), one, one, ints(8)) for start in range(1, 4)),
        Work(tuple(Verb("free", row) for row in (1, 2)), ints(0), ints(4), one, one, ints(3)),
        Work((Verb("allocate", 1),), ints(0, 1), ints(5, 0), ints(1, 1), ints(1, 1), ints(4, 9)),
        Work((Verb("allocate", 2),), ints(1, 2), ints(1, 0), ints(1, 1), ints(1, 1), ints(4, 9)),
        Work((), ints(0, 1, 2), ints(6, 2, 1), three, three, ints(1, 2, 3)),
    ]
    for work in works:
        found, wanted = executor.run(work).logits, plain.run(work).logits
        # The head is the table: the broken id has no score either.
        torch.testing.assert_close(found[:, 1:], wanted[:, 1:], rtol=1e-9, atol=1e-9)
        assert found[:, 1:].isfinite().all()


def test_what_wants_more_than_logits_is_left_alone() -> None:
    executor = of_captured(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    plain = one_feed([4], start=3)
    works = [
        replace(plain, extras={0: Extra(hidden=True)}),
        replace(plain, starts=ints(4), extras={0: Extra(layers=True)}),
        replace(plain, starts=ints(5), extras={0: Extra(attentions=True)}),
        replace(plain, starts=ints(6), logits=ints(0)),
        replace(plain, starts=ints(7), extras={0: Extra(mask=torch.ones(1, 1, 8) > 0)}),
        Work((), ints(0), ints(8), ints(2), ints(2), ints(4, 5)),
    ]
    for work in works:
        output = executor.run(work)
        assert len(output.logits) == int(work.logits.sum())
        asked = {f for f, one in work.extras.items() if one.hidden or one.layers or one.attentions}
        assert {*output.answers} == asked
    assert executor.captures == CaptureCounts(other=7)


def test_a_step_that_cannot_be_captured_is_run_all_the_same() -> None:
    def refuse(step: Callable[[], Tensor]) -> tuple[Replay, Tensor]:
        raise RuntimeError("operation not permitted\nwhere a stream is captured")

    model = model_of("plain")
    executor, other = TorchExecutor(model, capture=lambda device: refuse), TorchExecutor(model)
    for one in (executor, other):
        one.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for start in range(3, 9):
            work = one_feed([start], start=start)
            torch.testing.assert_close(executor.run(work).logits, other.run(work).logits)
    (warning,) = told
    assert "starts its kernels one by one: operation not permitted" in str(warning.message)
    assert "where a stream" not in str(warning.message)
    assert executor.captures == CaptureCounts(first=1, other=5)


def test_an_error_forgets_what_was_captured() -> None:
    executor = of_captured(model_of("plain"))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    for start in range(3, 6):
        executor.run(one_feed([4], start=start))
    with pytest.raises(Exception, match="fed at the wrong place"):
        executor.run(one_feed([4], start=9))
    executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    found = executor.run(one_feed([4], start=3)).logits
    plain = TorchExecutor(model_of("plain"))
    wanted = plain.run(one_feed([1, 2, 3, 4], verbs=(OPEN,))).logits[-1:]
    torch.testing.assert_close(found, wanted)
    assert (executor.captures.first, executor.captures.captured) == (2, 1)


def test_what_an_executor_captured_the_next_one_replays() -> None:
    model = family_model("llama")
    first = of_captured(model)
    first.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    for start in range(3, 6):
        first.run(one_feed([4], start=start))
    at_work = TorchExecutor(model, capture=rerunning)  # the first one has its own still
    assert at_work.cache is not first.cache
    kept = first.cache
    del first
    gc.collect()
    second = TorchExecutor(model, capture=rerunning)
    assert second.cache is kept and second.audit() == {}
    second.run(one_feed([7, 8, 9], verbs=(OPEN,)))
    found = second.run(one_feed([1], start=3)).logits
    wanted = TorchExecutor(model).run(one_feed([7, 8, 9, 1], verbs=(OPEN,))).logits[-1:]
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert second.captures == CaptureCounts(replayed=1, other=1)
    assert TorchExecutor(model).cache is not kept


def test_what_was_cut_short_is_left_to_nobody() -> None:
    model = family_model("llama")
    first = of_captured(model)
    first.run(one_feed([1, 2, 3], verbs=(OPEN,)))
    with pytest.raises(Exception, match="fed at the wrong place"):
        first.run(one_feed([4], start=9))
    del first
    gc.collect()
    assert kept_steps(model, (rerunning, None)) is None


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_the_laws_hold(name: str) -> None:
    model = family_model(name, **({"sliding_window": 5} if name == "mistral" else {}))
    counts = []

    def executor(mix: object, max_rows: int) -> TorchExecutor:
        opened = TorchExecutor(model, capture=rerunning)  # with what others have left
        counts.append(opened.captures)
        return opened

    laws = Laws(executor)
    for seed in range(5):
        laws.check(for_decoder(random_mix(seed)))
    assert sum(one.replayed for one in counts) > 50


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_give_what_the_cpu_gives(name: str, dtype: torch.dtype) -> None:
    here = model_of(name)
    there = convert_model(here, device="cuda", dtype=dtype)
    executor = open_executor(there)
    assert isinstance(executor, TorchExecutor)
    for seed in range(3):
        wanderer = Wanderer(here, np.random.default_rng(seed), False, 90, anywhere=False)
        wanderer.plain = True
        error = 1e-5 if dtype == torch.float64 else 1e-3
        wander(wanderer, here, executor, 40, error)
        executor.run(Work(tuple(Verb("free", row) for row in wanderer.histories), *[ints()] * 5))
    assert executor.captures.replayed > executor.captures.captured > 0


def test_a_model_says_whether_its_steps_are_captured() -> None:
    """On the CPU none are; what a device makes of it is a matter of the network alone."""
    plain, experts = family_model("llama"), family_model("mixtral")
    assert "captured" not in chosen(plain, "auto", frozenset({"nothing known"}))
    assert can_be_captured(plain.network) and not can_be_captured(experts.network)
    assert not can_be_captured(family_model("mamba", state_size=4).network)


@pytest.mark.cuda
def test_calls_replay_unless_operators_are_asked_for() -> None:
    there = convert_model(model_of("plain"), device="cuda")
    for name, replayed in (("auto", 1), ("torch", 0)):
        assert ("captured" in chosen(there, name)) == bool(replayed)
        executor = open_executor(there, name)
        assert isinstance(executor, TorchExecutor)
        executor.run(one_feed([1, 2, 3], verbs=(OPEN,)))
        for start in range(3, 5):
            executor.run(one_feed([4], start=start))
        assert executor.captures.replayed == replayed


@pytest.mark.cuda
def test_graphs_that_nobody_holds_end_no_capture() -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    numbers = torch.arange(4, device="cuda")

    def step() -> Tensor:
        for _ in range(3000):  # enough for the collector, were it at work
            [[]].append([])
        return numbers * 2

    for _ in range(5):
        circle: list[object] = [capture(step)]
        circle.append(circle)
        del circle
        replay, out = capture(step)
        replay()
        assert out.tolist() == [0, 2, 4, 6]


@pytest.mark.cuda
def test_operators_that_wait_cannot_be_captured() -> None:
    capture = CudaCapture(torch.device("cuda", 0))
    numbers = torch.arange(4, device="cuda")
    replay, out = capture(lambda: numbers * 2)
    numbers += 1
    replay()
    assert out.tolist() == [2, 4, 6, 8]
    del replay, out  # its memory serves those after it
    replay, out = capture(lambda: numbers * 2)
    replay()
    assert out.tolist() == [2, 4, 6, 8]
    with pytest.raises(RuntimeError):
        capture(lambda: numbers[numbers > int(numbers[0])])
    replay()
    assert out.tolist() == [2, 4, 6, 8]
