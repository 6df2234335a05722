"""What the engine asks of an executor, counted: forwards, tokens, forks, waits for a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep import draws
from everystep.draws import SeededDraws
from everystep.engine import Engine, Guidance, Lockstep, drafting
from everystep.engine.alternatives import fork_rows
from everystep.engine.feed import Feeds
from everystep.engine.watching import StepRecord
from everystep.processors import best, edits
from everystep.strategies import Beam, Greedy, Sample, single
from everystep.testing.hash_model import HashExecutor
from everystep.types import Answer, FinishReason, Prompt, Request, Sequence, StepOutput, Work
from tests.judges.drive import Drive, hash_executor
from tests.judges.mixes import Mix, kinds, random_mix

SEEDS = range(40)


def run(
    requests: Iterable[Request],
    executor: HashExecutor,
    observers: Iterable[Callable[[StepRecord], None]] = (),
) -> Drive:
    """A lockstep run."""
    one = Drive(Engine(executor, Lockstep(), observers))
    for request in requests:
        one.submit(request)
    return one.finish()


def requests_of(*kinds: type, drafts: bool = False) -> list[tuple[Mix, Request]]:
    """Requests with such a strategy, with drafts or without, out of the first mixes."""
    return [
        (mix, request)
        for mix in map(random_mix, SEEDS)
        for request in mix.requests
        if isinstance(request.strategy, kinds) and (request.drafter is not None) == drafts
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_one_forward(seed: int) -> None:
    mix = random_mix(seed)
    executor = hash_executor(mix)
    assert run(mix.requests, executor).engine.counts.steps == executor.counts["forwards"]


def test_a_prompt_is_fed_once_whatever_the_width() -> None:
    for mix, request in requests_of(Greedy, Sample):
        executor = hash_executor(mix)
        sequences = run([request], executor).results[request.request_id]
        prompts = [request.prompt, *request.companions]
        after_the_first = sum(len(sequence.tokens) - 1 for sequence in sequences)
        expected = sum(p.length for p in prompts) + len(prompts) * after_the_first
        assert executor.counts["tokens"] == expected


def test_beams_feed_a_prompt_once_and_then_a_token_each() -> None:
    for mix, request in requests_of(Beam):
        executor = hash_executor(mix)
        steps = run([request], executor).engine.counts.steps
        prompts = [request.prompt, *request.companions]
        per_step = len(prompts) * request.strategy.width
        expected = sum(p.length for p in prompts) + (steps - 1) * per_step
        assert executor.counts["tokens"] == expected


@pytest.mark.parametrize("strategy", [Beam(4, max_new=9), Sample(4)])
@pytest.mark.parametrize("guided", [False, True])
def test_after_a_preemption_what_is_shared_is_fed_once(
    strategy: Beam | Sample, guided: bool
) -> None:
    prompt = Prompt(ids=np.arange(200) % 11)
    companions = (Prompt(ids=np.arange(100) % 11),) if guided else ()
    readout = Guidance(1.5) if guided else None
    request = Request(
        "r", prompt, strategy, SeededDraws(0), (), companions=companions, readout=readout
    )
    one = Drive(Engine(HashExecutor(11), Lockstep()))
    group = one.engine.submit(request)
    for _ in range(5):
        one.engine.step()
    before = one.engine.counts.fed
    one.engine.preempt(group)
    one.engine.step()
    one.engine.step()
    assert all(unit.row is not None for sequence in group.live for unit in sequence.units)
    prompts = prompt.length + sum(companion.length for companion in companions)
    own = 4 * 5 * (1 + len(companions))
    assert prompts < one.engine.counts.fed - before <= prompts + own


def test_speculation_takes_fewer_steps() -> None:
    steps = np.zeros(2, dtype=int)
    for mix, request in requests_of(Greedy, Sample, drafts=True):
        plain = replace(request, drafter=None)
        steps += [run([r], hash_executor(mix)).engine.counts.steps for r in (request, plain)]
    assert steps[0] < steps[1]


def needed_forks(record: StepRecord) -> int:
    """One for each child that goes on beside another child of its row, and for each prompt of it.

    All siblings of an opening group come from one row.
    """
    going = [p for p, reason in _children(record) if reason is None]
    scored = record.scored
    groups = [scored.groups[scored.layout.group_of[parent]] for parent in going]
    lines = [scored.layout.sequences[parent].line for parent in going]
    sources = dict(zip(lines, groups, strict=True))
    prompts = [1 + len(group.request.companions) for group in groups]
    return sum(prompts) - sum(1 + len(group.request.companions) for group in sources.values())


def _children(record: StepRecord) -> list[tuple[int, FinishReason | None]]:
    return list(zip(record.children.parent.tolist(), record.children.finish, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_no_row_is_copied_without_need(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = random_mix(seed)
    executor = hash_executor(mix)
    needed: list[int] = []

    def forked(sequence: Sequence, feeds: Feeds) -> None:
        """Every alternative that is fed has forks of its own."""
        fork_rows(sequence, feeds)
        copies = feeds.added_to(sequence).alternatives
        needed.append(sum(len(one.units) for one in copies))

    monkeypatch.setattr(drafting, "fork_rows", forked)
    run(mix.requests, executor, [lambda record: needed.append(needed_forks(record))])
    assert executor.counts["fork"] == sum(needed)


# --- waiting for the device -----------------------------------------------------------------------

WAITING = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.nonzero,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.unique,
    torch.nonzero,
    torch.unique,
    torch.equal,
}


class OnDevice(Tensor):
    """A tensor that pretends to lie on an accelerator: whatever waits for it is written down."""

    waits: list[str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WAITING:
            cls.waits.append(func.__name__)
        if func is Tensor.cpu:
            cls.waits.append("cpu")
            return args[0].as_subclass(Tensor)
        return super().__torch_function__(func, types, args, kwargs or {})


class DeviceExecutor(HashExecutor):
    """The hash model, with logits and hidden states that pretend to lie on an accelerator."""

    def run(self, work: Work) -> StepOutput:
        output = super().run(work)
        answers = {
            f: Answer(hidden=one.hidden.as_subclass(OnDevice))
            for f, one in output.answers.items()
            if one.hidden is not None
        }
        return replace(output, logits=output.logits.as_subclass(OnDevice), answers=answers)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_waits_for_the_device_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait but the transfer of what was picked would be one too many."""
    for module in (draws, best, edits, single):
        monkeypatch.setattr(module, "on_host", lambda scores: not isinstance(scores, OnDevice))
    mix = random_mix(seed)
    OnDevice.waits = []
    # What a hook of the caller looks at, it waits for; so do a mask of allowed sequences, which
    # may become a shortlist, and the ratings of samples.
    waiting = {"allowed", "best_of"}
    known = [request for request in mix.requests if not waiting & {*kinds(request)}]
    plain = tuple(replace(request, hooks=()) for request in known)
    steps = run(plain, DeviceExecutor(mix.vocab_size)).engine.counts
    assert set(OnDevice.waits) <= {"cpu"}
    assert steps.syncs <= steps.steps
