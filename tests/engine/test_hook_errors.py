"""What is wrong with a hook ends its own request alone, with an error that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from everystep.engine import Continuous, Engine, Lockstep
from everystep.errors import EverystepError, InvariantError, RequestError
from everystep.testing.hash_model import HashExecutor
from everystep.types import AfterStep, BeforeStep, Next, PromptMoment
from everystep.types.hooks import Hook
from tests.engine.test_hooks import CALM, FUNCTION, VOCABULARY, WAYS, Says, engine, request, run
from tests.judges.drive import Drive

E = FUNCTION.embed_dim
NONSENSE: dict[str, tuple[Hook, str]] = {
    "not a mapping": (Says(before=lambda step: [step.embeds]), "mapping"),
    "not a tensor": (Says(before=lambda step: {"embeds": 3}), "a tensor"),
    "too few": (Says(before=lambda step: {"embeds": torch.zeros(0, E)}), "shape"),
    "too wide": (Says(before=lambda step: {"embeds": torch.zeros(step.count, 9)}), "shape"),
    "whole numbers": (
        Says(before=lambda step: {"embeds": torch.zeros(step.count, E).long()}),
        "of floats",
    ),
    "an unnamed input": (Says(before=lambda step: {"box": step.embeds}), "'box'"),
    "no Next": (Says(lambda step: 5), "everystep.Next"),
    "an id beyond the vocabulary": (Says(lambda step: Next(force=[VOCABULARY])), "ids from 0"),
    "no ids": (Says(lambda step: Next(force="word")), "ids from 0"),
    "half an id": (Says(lambda step: Next(force=[0.5])), "ids from 0"),
    "unread scores": (Says(lambda step: step.scores, reads=()), "reads"),
}


@pytest.mark.parametrize("scheduler", [Lockstep, lambda: Continuous(64, max_rows=64)])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_ends_its_own_request_alone(name: str, scheduler: Callable[[], Any]) -> None:
    hook, text = NONSENSE[name]
    going = Drive(Engine(HashExecutor(VOCABULARY), scheduler()))
    for one in (request("beams"), request("greedy", hook), request("sampling", CALM)):
        going.submit(one)
    going.finish()
    assert isinstance(going.groups["greedy"].error, RequestError)
    assert text in str(going.groups["greedy"].error)
    assert going.results["beams"] == run(request("beams"))
    assert going.results["sampling"] == run(request("sampling", CALM))


@dataclass(frozen=True)
class Fails(Hook):
    """Raises in its n-th call."""

    call: int
    error: Exception
    calls: list[int] = field(default_factory=list, compare=False)

    def _count(self) -> None:
        self.calls.append(1)
        if len(self.calls) >= self.call:
            raise self.error

    def on_prompt(self, moment: PromptMoment) -> None:
        self._count()

    def before_step(self, step: BeforeStep) -> None:
        self._count()

    def after_step(self, step: AfterStep) -> None:
        self._count()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_hook_raises_ends_its_own_request_alone(way: str) -> None:
    neighbour = run(request("beams", CALM))
    for call in (1, 2, 3, 4, 7):
        error, going = KeyError("mine"), Drive(engine())
        for one in (request("beams", CALM), request(way, Fails(call, error), request_id="bad")):
            going.submit(one)
        going.finish()
        assert going.groups["bad"].error is error, call
        assert going.results["beams"] == neighbour
    with pytest.raises(InvariantError):  # nobody's own: the step is broken
        run(request(way, Fails(3, InvariantError("a defect"))))


def test_two_hooks_that_force_other_tokens_are_an_error() -> None:
    one, other = (Says(lambda step, n=n: Next(force=[n])) for n in (1, 2))  # type: ignore[misc]
    with pytest.raises(RequestError, match="force other tokens"):
        run(request("greedy", one, other))
    run(request("greedy", one, one))


@pytest.mark.parametrize("names", [{"gives": ("embed",)}, {"gives": ("mask",)}, {"reads": ("x",)}])
def test_unknown_names_are_refused_before_any_compute(names: Any) -> None:
    at = engine()
    with pytest.raises(EverystepError, match="unknown name"):
        at.submit(request("greedy", Says(**names)))
    assert not at.pending


def test_a_request_needs_what_its_hooks_give_and_read() -> None:
    assert request("greedy", Hook.__new__(type("Plain", (Hook,), {}))).needs == frozenset()
    assert request("greedy", Says(gives=("embeds", "box"))).needs == {"embeds", "box", "hidden"}


def test_a_memory_that_cannot_be_written_is_named() -> None:
    at = engine()
    group = at.submit(request("greedy", Says(lambda step: Next(memory=torch.zeros(2)))))
    at.step()
    with pytest.raises(RequestError, match="Tensor"):
        at.dump(group)
