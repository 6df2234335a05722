"""Code of a caller that writes to what it is given: an error, or nothing changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.engine import Continuous, Engine
from everystep.processors.base import UserProcessor
from everystep.processors.bias import PrefixConstrainedLogitsProcessor
from everystep.stops.ends import UserStop
from everystep.testing.hash_model import HashExecutor
from everystep.types import (
    AfterStep,
    BeforeStep,
    Injected,
    Prompt,
    PromptMoment,
    Wants,
)
from everystep.types.hooks import Hook
from tests.engine.test_hooks import VOCABULARY, request, run
from tests.judges.dice import EMBED_DIM
from tests.judges.drive import Drive

PLAIN = run(request("greedy"))


class Vandal(Hook):
    """A hook that writes to one thing at one moment."""

    reads = ("scores", "logits", "hidden")

    def __init__(self, moment: str, spoil: Callable[[Any], None]) -> None:
        self.moment, self.spoil = moment, spoil

    def on_prompt(self, moment: PromptMoment) -> None:
        if self.moment == "on_prompt":
            self.spoil(moment)

    def before_step(self, step: BeforeStep) -> None:
        if self.moment == "before_step":
            self.spoil(step)

    def after_step(self, step: AfterStep) -> None:
        if self.moment == "after_step":
            self.spoil(step)


def spoilt_ids(moment: Any) -> None:
    moment.request.prompt.ids[0] = 9


def spoilt_line(step: Any) -> None:
    step.line[:] = 9


@pytest.mark.parametrize(
    ("moment", "spoil"),
    [
        ("on_prompt", spoilt_ids),
        ("before_step", spoilt_ids),
        ("after_step", spoilt_ids),
        ("before_step", spoilt_line),
        ("after_step", spoilt_line),
    ],
)
@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
def test_the_ids_cannot_be_written_to(way: str, moment: str, spoil: Callable[[Any], None]) -> None:
    with pytest.raises(ValueError, match="read-only"):
        run(request(way, Vandal(moment, spoil)))


def spoil_all(names: tuple[str, ...]) -> Callable[[Any], None]:
    def spoil(step: Any) -> None:
        for name in names:
            getattr(step, name)[:] = 3

    return spoil


@pytest.mark.parametrize(
    ("moment", "names"),
    [
        ("before_step", ("ids", "generated", "embeds")),
        ("after_step", ("generated", "scores", "logits", "hidden")),
    ],
)
@pytest.mark.parametrize("way", ["greedy", "sampling", "beams", "prompt lookup"])
def test_what_else_a_step_shows_is_a_copy(way: str, moment: str, names: tuple[str, ...]) -> None:
    assert run(request(way, Vandal(moment, spoil_all(names)))) == run(request(way))


def test_embeddings_that_a_hook_adds_to_are_those_of_the_prompt_whenever_it_is_asked() -> None:
    """After a preemption too: what it wrote to was its own."""

    class Adds(Hook):
        gives = ("embeds",)

        def before_step(self, step: BeforeStep) -> Mapping[str, Tensor] | None:
            found = step.embeds
            found += 1.0
            return {"embeds": found}

    embeds = torch.randn(5, EMBED_DIM)
    before = embeds.clone()
    asked = replace(request("greedy", Adds()), prompt=Prompt(embeds=embeds))
    wanted = run(asked)
    assert torch.equal(embeds, before)
    going = Drive(Engine(HashExecutor(VOCABULARY), Continuous(256, max_rows=64)))
    going.submit(asked)
    for _ in range(3):
        going.step()
    going.engine.preempt(going.groups["greedy"])
    assert going.finish().results["greedy"] == wanted


def test_a_later_hook_writes_to_copies_of_what_an_earlier_one_gives() -> None:
    class Gives(Hook):
        gives = ("embeds",)

        def before_step(self, step: BeforeStep) -> Mapping[str, Tensor]:
            return {"embeds": step.embeds + 1}

    def spoil(step: Any) -> None:
        step.given["embeds"][:] = 0
        step.given["embeds"] = torch.zeros(1)

    first = run(request("greedy", Gives()))
    assert run(request("greedy", Gives(), Vandal("before_step", spoil))) == first


def test_a_prompts_places_cannot_be_written_to() -> None:
    injected = Injected(np.array([1, 2]), torch.zeros(2, EMBED_DIM))
    with pytest.raises(ValueError, match="read-only"):
        injected.positions[0] = 0


def test_processors_and_prefix_functions_write_to_copies() -> None:
    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        found = scores.clone()
        ids[:], scores[:] = 3, 0.0
        return found

    def anything(_: int, ids: Tensor) -> list[int]:
        ids[:] = 3
        return [*range(VOCABULARY)]

    for one in (UserProcessor(processor), PrefixConstrainedLogitsProcessor(anything, 1)):
        assert run(request("greedy", processors=(one,))) == PLAIN


def test_criteria_write_to_copies() -> None:
    def criterion(ids: Tensor, scores: Any) -> bool:
        ids[:] = 3
        for step in scores or ():
            step[:] = 0.0
        return False

    for wants in (Wants(), Wants(history=True)):
        for way in ("greedy", "beams"):
            asked = request(way, wants=wants)
            asked = replace(asked, stops=(*asked.stops, UserStop(criterion)))
            assert run(asked) == run(request(way))
