"""Calls of several threads on one engine: the tokens of each, in the steps of the longest."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import everystep as es
from everystep.api.model import LanguageModel
from everystep.config import is_data
from everystep.drivers import driver as drivers
from everystep.drivers.driver import Driver
from everystep.drivers.session import Session
from everystep.engine import Engine, audit
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer

pytestmark = pytest.mark.native

TOKENIZER = tiny_tokenizer(320)
PROMPTS = ["one", "two words", "three", "a fourth prompt"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return tiny_llama(dtype=torch.float32, vocab_size=320)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """The engines that step, one entry per step."""
    found: list[Engine] = []
    step = Engine.step

    def counted(engine: Engine) -> Any:
        found.append(engine)
        return step(engine)

    monkeypatch.setattr(Engine, "step", counted)
    return found


def meet(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Every thread's first step waits until all have submitted their prompts."""
    barrier, wait, here = threading.Barrier(threads), Driver.step_until, threading.local()

    def together(self: Driver, is_over: Callable[[], bool]) -> None:
        if not getattr(here, "met", False):
            here.met = True
            barrier.wait(60)
        wait(self, is_over)

    monkeypatch.setattr(Driver, "step_until", together)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """What each call gives in a thread of its own, or the error it raises."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def calls_of(model: LanguageModel, prompts: list[str], **options: Any) -> list[Callable[[], Any]]:
    return [lambda one=one: es.generate(model, TOKENIZER, one, **options) for one in prompts]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"do_sample": True, "seed": 3},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "stop": {"stop_strings": ["e"]},
    "configuration": {"generation_config": es.GenerationConfig(repetition_penalty=1.3)},
}


@pytest.mark.parametrize("way", WAYS)
def test_each_thread_gets_what_it_gets_alone(
    model: LanguageModel, engines: list[Engine], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    options = {**OPTIONS, **WAYS[way], "return_dict_in_generate": True}
    calls = calls_of(model, PROMPTS, **options)
    alone, steps = [], []
    for call in calls:
        engines.clear()
        alone.append(call())
        steps.append(len(engines))
    engines.clear()
    meet(monkeypatch, len(calls))
    assert at_once(calls) == alone
    assert len(set(engines)) == 1
    if way != "drafts":  # whose lengths depend on what steps take
        assert len(engines) == max(steps)
    audit(engines[0])


def test_another_ways_prompts_share_the_steps(
    model: LanguageModel, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [calls_of(model, [PROMPTS[0]], **OPTIONS, **way)[0] for way in WAYS.values()]
    alone = [call() for call in calls]
    engines.clear()
    meet(monkeypatch, len(calls))
    assert at_once(calls) == alone
    assert len(set(engines)) == 1


@pytest.mark.parametrize("way", ["greedy", "drawn", "beams", "stop"])
def test_two_streams_read_the_weights_once_per_step(
    model: LanguageModel, engines: list[Engine], way: str
) -> None:
    """Here in turns in two threads: what one of them steps, the other finds."""
    options = {**OPTIONS, **WAYS[way]}
    alone, steps = [], []
    for prompt in PROMPTS[:2]:
        engines.clear()
        alone.append(list(es.stream(model, TOKENIZER, prompt, **options)))
        steps.append(len(engines))
    engines.clear()
    both = [es.stream(model, TOKENIZER, prompt, **options) for prompt in PROMPTS[:2]]
    found: list[list[Any]] = [[], []]
    turns = threading.Barrier(2)

    def read(own: int) -> None:
        for event in both[own]:
            found[own].append(event)
            if way != "beams":
                turns.wait(60)
        turns.abort()

    def reading(own: int) -> None:
        try:
            read(own)
        except threading.BrokenBarrierError:
            found[own].extend(both[own])

    at_once([lambda: reading(0), lambda: reading(1)])
    assert found == alone
    assert len(set(engines)) == 1
    if way != "beams":
        assert len(engines) <= max(steps) + 1
    audit(engines[0])


def test_a_stream_that_nobody_reads_is_set_aside(
    model: LanguageModel, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everystep.drivers.stream._AHEAD", 4)
    options = {**OPTIONS, "max_new_tokens": 60}
    alone = [list(es.stream(model, TOKENIZER, one, **options)) for one in PROMPTS[:2]]
    slow = es.stream(model, TOKENIZER, PROMPTS[0], **options)
    assert list(es.stream(model, TOKENIZER, PROMPTS[1], **options)) == alone[1]
    (group,) = slow.groups
    assert 4 <= group.live[0].generated < 60
    assert list(slow) == alone[0]


def test_a_stream_that_is_dropped_ends(model: LanguageModel, engines: list[Engine]) -> None:
    dropped = es.stream(model, TOKENIZER, PROMPTS[0], **{**OPTIONS, "max_new_tokens": 200})
    next(dropped)
    other = es.stream(model, TOKENIZER, PROMPTS[1], **OPTIONS)
    next(other)
    (group,) = dropped.groups
    del dropped
    list(other)
    assert group.done[0].reason.kind == "cancelled"
    assert not engines[-1].pending


def banned(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[:, 7] = -torch.inf
    return scores


def test_code_of_the_caller_runs_in_his_thread(
    model: LanguageModel, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def call(prompt: str) -> int:
        def noted(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ran.append((prompt, threading.get_ident()))
            return scores

        es.generate(model, TOKENIZER, prompt, logits_processor=[noted], **OPTIONS)
        return threading.get_ident()

    meet(monkeypatch, 3)
    threads = at_once([lambda one=one: call(one) for one in PROMPTS[:3]])
    assert len(set(engines)) == 3
    assert set(ran) == set(zip(PROMPTS, threads, strict=False))


def test_other_executors_are_not_shared(
    engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums depend on the batch."""
    plain = tiny_llama(dtype=torch.float64, vocab_size=320)
    meet(monkeypatch, 2)
    at_once(calls_of(plain, PROMPTS[:2], **OPTIONS))
    assert len(set(engines)) == 2


def test_a_prompt_that_fails_ends_its_own_call(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    suppressed = {"suppress_tokens": list(range(320))}
    calls = calls_of(model, PROMPTS[:3], **OPTIONS)
    alone = [call() for call in calls]
    calls.append(calls_of(model, PROMPTS[3:], **OPTIONS, **suppressed)[0])
    meet(monkeypatch, len(calls))
    *found, failed = at_once(calls)
    assert found == alone
    assert isinstance(failed, es.EverystepError) and "no token can be drawn" in str(failed)


def test_an_interrupt_ends_the_call_of_its_thread(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = calls_of(model, PROMPTS, **OPTIONS)
    alone = [call() for call in calls]
    left, step, engines = [5], Engine.step, set()

    def interrupted(engine: Engine) -> Any:
        engines.add(engine)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    meet(monkeypatch, len(calls))
    found = at_once(calls)
    assert sum(isinstance(one, KeyboardInterrupt) for one in found) == 1
    others = [i for i, one in enumerate(found) if not isinstance(one, KeyboardInterrupt)]
    assert [found[i] for i in others] == [alone[i] for i in others]
    (engine,) = engines
    assert not engine.pending
    audit(engine)


def test_who_waits_for_prompts_holds_nobody_up(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who is first in line leaves it for as long as his next prompt does not come."""
    go = threading.Event()

    def slowly() -> Iterator[str]:
        yield PROMPTS[0]
        go.wait(60)
        yield PROMPTS[1]

    alone = [call() for call in calls_of(model, PROMPTS, **OPTIONS)]
    monkeypatch.setattr("everystep.drivers.session._INSIDE", 1)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(lambda: es.generate(model, TOKENIZER, slowly(), **OPTIONS))
        assert es.generate(model, TOKENIZER, PROMPTS[2], **OPTIONS) == alone[2]
        go.set()
        assert slow.result(60) == alone[:2]


def test_how_much_is_cached_does_not_depend_on_other_threads(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "the same long beginning of every prompt there is"
    calls = calls_of(model, [long] * 3, **OPTIONS, return_dict_in_generate=True)
    meet(monkeypatch, 3)
    assert [one.cached_tokens for one in at_once(calls)] == [0, 0, 0]


def test_nothing_is_kept_after_the_last_call(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    meet(monkeypatch, 2)
    at_once(calls_of(model, PROMPTS[:2], **OPTIONS))
    gc.collect()
    core: Any = model.core
    assert dict(drivers._OPEN.get(core, {})) == {}


def test_a_call_that_fails_takes_its_prompts_along(
    model: LanguageModel, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here between two of its prompts; its second would last much longer than the other call."""
    alone = calls_of(model, PROMPTS[:1], **OPTIONS)[0]()

    class Failing:
        def __enter__(self) -> Callable[[], None]:
            return self.fail

        def __exit__(self, *_: object) -> None:
            pass

        def fail(self) -> None:
            raise OSError("the terminal is gone")

    monkeypatch.setattr("everystep.api.many.progress_bar", lambda *_: Failing())
    long = {**OPTIONS, "max_new_tokens": 200, "options": [{"max_new_tokens": 1}, {}]}
    engines.clear()
    meet(monkeypatch, 2)
    gone = threading.Event()

    def failing() -> Any:
        try:
            return es.generate(model, TOKENIZER, PROMPTS[1:3], **long)
        finally:
            gone.set()

    def whole() -> Any:
        prompts = 2 * PROMPTS[:1]
        session = Session(model, TOKENIZER, prompts, [{}, {"max_new_tokens": 14}], None, OPTIONS)
        found = list[Any]()
        for _, result, _ in session.run(prompts):
            found.append(result)
            assert gone.wait(60)  # so that a step follows in which the others are gone
        return found

    failed, found = at_once([failing, whole])
    assert isinstance(failed, OSError)
    assert found[0] == alone
    assert len(engines) < 20
    (engine,) = set(engines)
    assert not engine.pending


def test_prompts_leave_without_waiting_even_within_a_step(model: LanguageModel) -> None:
    """A generator that garbage collection closes there would wait for its own thread."""
    session = Session(model, TOKENIZER, PROMPTS[:1], None, None, OPTIONS, shares=False)
    request = session.request(PROMPTS[0], 0)
    shared = Driver(session.driver(request).engine)
    first, second = shared.submit((request,)), shared.submit((request,))
    step = shared.engine.step
    left = list[Any]()

    def leaving() -> Any:
        if not left:
            left.append(shared.leave(second))
        return step()

    shared.engine.step = leaving  # type: ignore[method-assign]
    shared.step_until(lambda: first.over)
    reasons = [[one.reason.kind for one in box.groups[0].done] for box in (first, second)]
    assert reasons == [["length"], ["cancelled"]] and second.over


def test_a_call_within_a_step_has_an_engine_of_its_own(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a tokenizer of the caller's may make one."""
    (alone, other) = (call() for call in calls_of(model, PROMPTS[:2], **OPTIONS))
    step, inner = Engine.step, list[Any]()

    def nested(engine: Engine) -> Any:
        if not inner:
            inner.append(None)
            inner[0] = es.generate(model, TOKENIZER, PROMPTS[1], **OPTIONS)
        return step(engine)

    monkeypatch.setattr(Engine, "step", nested)
    assert es.generate(model, TOKENIZER, PROMPTS[0], **OPTIONS) == alone
    assert inner == [other]


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"top_k": 3, "bias": [((1, 2), 0.5)], "stop": None}, True),
        ({"generation_config": es.GenerationConfig(top_k=3)}, True),
        ({"logits_processor": [banned]}, False),
        ([{"streamer": object()}], False),
    ],
)
def test_what_is_data(value: Any, wanted: bool) -> None:
    assert is_data(value) is wanted
