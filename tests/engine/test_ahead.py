"""What needs no scores is found out while the model computes, by a thread of the engine."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import SeededDraws
from everystep.engine import Engine, Lockstep, PromptLookup, ahead, audit
from everystep.processors.base import LogitsProcessor
from everystep.stops.ends import MaxLength
from everystep.strategies import Beam, Greedy
from everystep.testing.hash_model import HashExecutor
from everystep.types import Prompt, Request, Rows, Sequence, StepOutput, Work

SIZE = 24
PATIENCE = 30.0


@dataclass(frozen=True, eq=False)
class Foreseeing(LogitsProcessor):
    """Bans what the last id says, and remembers the ban as soon as it may.

    `begun` is set once something was foreseen. `wrong`: it fails instead.
    """

    begun: threading.Event = field(default_factory=threading.Event)
    threads: set[str] = field(default_factory=set)
    late: list[int] = field(default_factory=list)
    wrong: bool = False

    foresees = True

    def foresee(self, sequence: Sequence, line: np.ndarray, lengths: range) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        for length in lengths:
            self._ban(sequence, line, length)

    def _ban(self, sequence: Sequence, line: np.ndarray, length: int) -> int:
        if self.wrong:
            raise ValueError("no ban")
        known: dict[int, tuple[bytes, int]] = sequence.memo.get("bans", {})
        read = line[:length].tobytes()
        if known.get(length, (b"", 0))[0] != read:
            known = {**known, length: (read, int(line[length - 1] * 7 + length) % SIZE)}
            sequence.memo["bans"] = known
            if not threading.current_thread().name.startswith("everystep-ahead"):
                self.late.append(length)
        return known[length][1]

    def overwrite(self, rows: Rows, scores: Tensor) -> Tensor:
        for r, sequence in enumerate(rows.sequences):
            length = int(rows.lengths[r])
            scores[r, self._ban(sequence, rows.table.data[sequence.line], length)] = -torch.inf
        return scores


class Waiting(HashExecutor):
    """Its forward takes as long as something has to be foreseen first."""

    event: threading.Event | None = None
    waited = True

    def run(self, work: Work) -> StepOutput:
        if self.event is not None and len(work.rows):
            self.waited &= self.event.wait(PATIENCE)
            self.event.clear()
        return super().run(work)


def asked(processor: Foreseeing, **more: Any) -> Request:
    chosen = {"strategy": Greedy(), **more}
    return Request(
        "a", Prompt(ids=np.array([3, 5, 3, 5, 3])), draws=SeededDraws(5), processors=(processor,),
        stops=(MaxLength(16),), max_length=16, **chosen,
    )  # fmt: skip


def tokens(engine: Engine, request: Request) -> list[tuple[int, ...]]:
    group = engine.submit(request)
    while engine.pending:
        engine.step()
        audit(engine)
    if group.error is not None:
        raise group.error
    return [tuple(one.tokens.tolist()) for one in request.strategy.finish(group)]


WAYS = {
    "greedy": {},
    "beams": {"strategy": Beam(3, 3, max_new=11)},
    "drafts": {"drafter": PromptLookup(3)},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_done_while_the_model_computes(way: str) -> None:
    """Every forward waits for it, and scores are processed without anything left to find out."""
    processor, executor = Foreseeing(), Waiting(SIZE)
    executor.event = processor.begun
    found = tokens(Engine(executor, Lockstep()), asked(processor, **WAYS[way]))
    assert executor.waited and not processor.late
    assert all(name.startswith("everystep-ahead") for name in processor.threads)

    plain = Foreseeing()
    object.__setattr__(plain, "foresees", False)
    assert tokens(Engine(HashExecutor(SIZE), Lockstep()), asked(plain, **WAYS[way])) == found
    assert plain.late and not plain.threads


def test_what_fails_there_fails_its_own_request() -> None:
    engine = Engine(HashExecutor(SIZE), Lockstep())
    wrong, right = Foreseeing(wrong=True), Foreseeing()
    one, other = (engine.submit(replace(asked(p), request_id=str(id(p)))) for p in (wrong, right))
    while engine.pending:
        engine.step()
    assert isinstance(one.error, ValueError) and other.error is None
    assert wrong.threads and right.threads


def test_an_interrupted_forward_leaves_nobody_at_work() -> None:
    class Interrupted(HashExecutor):
        calls = 0

        def run(self, work: Work) -> StepOutput:
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().run(work)

    wanted = tokens(Engine(HashExecutor(SIZE), Lockstep()), asked(Foreseeing()))
    engine, request = Engine(Interrupted(SIZE), Lockstep()), asked(Foreseeing())
    group = engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        while engine.pending:
            engine.step()
    while engine.pending:
        engine.step()
        audit(engine)
    assert [tuple(one.tokens.tolist()) for one in request.strategy.finish(group)] == wanted


def test_after_two_interrupts_the_next_step_waits_for_what_is_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go, inside = threading.Event(), threading.Event()

    class Slow(Foreseeing):
        def foresee(self, sequence: Sequence, line: np.ndarray, lengths: range) -> None:
            inside.set()
            assert go.wait(PATIENCE)
            super().foresee(sequence, line, lengths)
            inside.clear()

    class Interrupted(HashExecutor):
        def run(self, work: Work) -> StepOutput:
            if not go.is_set():
                assert inside.wait(PATIENCE)
                raise KeyboardInterrupt
            return super().run(work)

    def interrupted(jobs: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    wanted = tokens(Engine(HashExecutor(SIZE), Lockstep()), asked(Foreseeing()))
    engine, request = Engine(Interrupted(SIZE), Lockstep()), asked(Slow())
    group = engine.submit(request)
    monkeypatch.setattr(ahead, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert inside.is_set()
    threading.Timer(0.1, go.set).start()
    engine.recover()
    assert go.is_set() and not inside.is_set()
    while engine.pending:
        engine.step()
        audit(engine)
    assert [tuple(one.tokens.tolist()) for one in request.strategy.finish(group)] == wanted


def test_a_forked_child_has_a_thread_of_its_own() -> None:
    engine = Engine(HashExecutor(SIZE), Lockstep())
    wanted = tokens(engine, asked(Foreseeing()))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(tokens(engine, asked(Foreseeing()))))
    child.start()
    assert queue.get(timeout=PATIENCE) == wanted
    child.join(PATIENCE)
    assert child.exitcode == 0
