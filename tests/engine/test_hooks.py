"""Hooks: what they give, force, stop and remember is that of a plain loop, whatever comes between.

Random hooks are part of the mixes that the laws are tried on; here are the cases one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import SeededDraws
from everystep.engine import Continuous, DraftModel, Engine, Lockstep, PromptLookup, audit
from everystep.errors import RequestError
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam, Contrastive, DiverseBeam, Greedy, Sample
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.types import (
    AfterStep,
    BeforeStep,
    InputSpec,
    Next,
    Prompt,
    PromptMoment,
    Request,
    StepOutput,
    Work,
)
from everystep.types.hooks import Hook
from tests.engine.mutants import HOOK_MUTANTS
from tests.engine.test_interrupts import Interrupt, Tripwire
from tests.judges.drive import Drive, result
from tests.judges.rules import Murmur
from tests.judges.textbook import Hypothesis, generate

VOCABULARY = 23
PROMPT = np.arange(11) % 4 + 1
NEW = 14
FUNCTION = HashFunction(VOCABULARY)
BUSY = Murmur(1, 3, 11, scored=True)
CALM = Murmur(2, 5, 13)

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"strategy": Greedy()},
    "sampling": {"strategy": Sample(3)},
    "beams": {"strategy": Beam(4, returns=3, max_new=NEW)},
    "sampled beams": {"strategy": Beam(3, returns=2, max_new=NEW, sampled=True)},
    "diverse beams": {"strategy": DiverseBeam(4, returns=4, max_new=NEW)},
    "contrastive": {"strategy": Contrastive(3, 0.6)},
    "prompt lookup": {"strategy": Greedy(), "drafter": PromptLookup(4)},
    "draft model": {
        "strategy": Greedy(),
        "drafter": DraftModel(partial(HashExecutor, VOCABULARY), 3),
    },
    "drafted sampling": {"strategy": Sample(2), "drafter": PromptLookup(3)},
}


def request(way: str, *hooks: Hook, **changes: Any) -> Request:
    """One that may end by a token, at its length, or by its hooks."""
    stops = (EosToken((7,)), MaxLength(len(PROMPT) + NEW))
    plain = Request(
        way, Prompt(ids=PROMPT), Greedy(), SeededDraws(5), stops=stops, hooks=hooks,
        max_length=len(PROMPT) + NEW,
    )  # fmt: skip
    return replace(plain, **{**WAYS[way], **changes})


def engine(*, budget: int = 256, inputs: tuple[InputSpec, ...] = ()) -> Engine:
    return Engine(HashExecutor(VOCABULARY, inputs=inputs), Continuous(budget, max_rows=64))


def run(asked: Request, at: Engine | None = None) -> list[Hypothesis]:
    """The result of the request; its error is raised."""
    going = Drive(at or engine())
    going.submit(asked)
    group = going.finish().groups[asked.request_id]
    if group.error is not None:
        raise group.error
    return result(group)


def comparable(found: list[Hypothesis], asked: Request) -> list[Hypothesis]:
    return found if isinstance(asked.strategy, Beam) else [replace(h, score=0.0) for h in found]


def book(asked: Request) -> list[Hypothesis]:
    return comparable(generate(asked, FUNCTION), asked)


def same_as_its_textbook(asked: Request, at: Engine | None = None) -> None:
    assert comparable(run(asked, at), asked) == book(asked)


HOOKS = [(BUSY,), (CALM,), (CALM, Murmur(3, 0, 0))]


@pytest.mark.parametrize("hooks", HOOKS, ids=["busy", "calm", "two"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_choose_equals_its_textbook(way: str, hooks: tuple[Hook, ...]) -> None:
    asked = request(way, *hooks)
    assert book(asked) != book(replace(asked, hooks=()))
    same_as_its_textbook(asked)


@pytest.mark.parametrize("way", WAYS)
def test_a_preemption_before_every_step_changes_nothing(way: str) -> None:
    asked, at = request(way, BUSY), engine()
    going = Drive(at)
    going.submit(asked)
    for _ in range(400):
        if not at.pending:
            break
        # What siblings share takes a step of its own before they can choose.
        if at.counts.steps % 3 == 0:
            at.preempt(going.groups[way])
        going.step()
    assert comparable(result(going.groups[way]), asked) == book(asked)


@pytest.mark.parametrize("way", ["greedy", "sampling", "beams"])
def test_without_a_cache_the_same_is_given_again(way: str) -> None:
    asked = request(way, BUSY)
    at = Engine(HashExecutor(VOCABULARY), Lockstep(shares=False))
    group = at.submit(asked)
    while at.pending:
        at.step()
        at.preempt(group)
    assert comparable(result(group), asked) == book(asked)


@pytest.mark.parametrize("budget", [4, 5, 7])
@pytest.mark.parametrize("way", ["greedy", "beams", "prompt lookup"])
def test_chunks_change_nothing(way: str, budget: int) -> None:
    same_as_its_textbook(request(way, BUSY), engine(budget=budget))


@pytest.mark.parametrize("way", ["sampling", "beams", "contrastive", "draft model"])
def test_an_interrupt_changes_nothing(way: str) -> None:
    asked = request(way, CALM)
    expected, wire = run(asked), Tripwire()
    wire.run(lambda: run(asked))
    for line in range(17, wire.lines, wire.lines // 20):
        going, wire = Drive(engine()), Tripwire(line)
        going.submit(asked)
        while going.engine.pending:
            try:
                wire.run(lambda: going.events.extend(going.engine.step()))  # noqa: B023
            except Interrupt:
                continue
        assert going.finish().results[way] == expected, line


@pytest.mark.parametrize("way", WAYS)
def test_saved_after_any_step_and_restored_it_goes_on(way: str) -> None:
    asked = request(way, BUSY)
    expected = run(asked)
    for steps in range(8):
        first = engine()
        group = first.submit(asked)
        for _ in range(steps):
            if first.pending:
                first.step()
        if not group.live:
            break
        second = engine()
        again = second.restore(asked, first.dump(group))
        while second.pending:
            second.step()
        audit(second)
        assert result(again) == expected


def test_a_saved_generation_belongs_to_its_hooks() -> None:
    asked, first = request("greedy", CALM), engine()
    data = first.dump(first.submit(asked))
    for other in ((), (BUSY,), (CALM, CALM)):
        with pytest.raises(RequestError, match="another request"):
            engine().restore(replace(asked, hooks=other), data)


# --- one thing at a time --------------------------------------------------------------------------


@dataclass(frozen=True)
class Says(Hook):
    """Answers from functions of a step."""

    after: Callable[[AfterStep], Any] = lambda step: None
    before: Callable[[BeforeStep], Any] = lambda step: None
    prompt: Callable[[PromptMoment], Any] = lambda moment: None
    gives: tuple[str, ...] = ("embeds",)
    reads: tuple[str, ...] = ("scores", "logits", "hidden")

    def on_prompt(self, moment: PromptMoment) -> Any:
        return self.prompt(moment)

    def before_step(self, step: BeforeStep) -> Any:
        return self.before(step)

    def after_step(self, step: AfterStep) -> Any:
        return self.after(step)


@pytest.mark.parametrize("budget", [4, 256])
def test_a_prompt_is_one_step_however_it_is_fed(budget: int) -> None:
    asked: list[list[int]] = []

    def before(step: BeforeStep) -> None:
        asked.append([*step.positions])

    own = request("greedy", Says(before=before), stops=(MaxLength(len(PROMPT) + 3),))
    run(own, engine(budget=budget))
    prompt = [*range(len(PROMPT))]
    assert [one for one in asked if one != prompt] == [[len(PROMPT)], [len(PROMPT) + 1]]
    assert asked[0] == prompt


@pytest.mark.parametrize("way", WAYS)
def test_forced_tokens_come_next_and_are_no_choice(way: str) -> None:
    words = [3, 9, 9, 2]

    def after(step: AfterStep) -> Next | None:
        return Next(force=words) if len(step.generated) == 2 else None

    for found in run(request(way, Says(after), stops=(MaxLength(len(PROMPT) + NEW),))):
        assert list(found.tokens[2:6]) == words
        assert len(found.tokens) == NEW


@pytest.mark.parametrize("way", WAYS)
def test_a_stop_ends_where_it_is_said(way: str) -> None:
    def after(step: AfterStep) -> Next:
        return Next(stop="enough" if len(step.generated) == 5 else False)

    going = Drive(engine())
    going.submit(request(way, Says(after), stops=(MaxLength(len(PROMPT) + NEW),)))
    group = going.finish().groups[way]
    for done in group.request.strategy.finish(group):
        assert len(done.tokens) == 5
        assert (done.reason.kind, done.reason.matched) == ("criteria", "enough")


@pytest.mark.parametrize("way", WAYS)
def test_memory_follows_its_hypothesis(way: str) -> None:
    """It says at every position what was chosen up to there."""

    def before(step: BeforeStep) -> None:
        known = len(PROMPT) + len(step.memory)
        if len(step.positions) == 1 and step.start <= known - 1:  # drafts are ahead of it
            assert tuple(step.generated) == step.memory[: step.start + 1 - len(PROMPT)]

    def after(step: AfterStep) -> Next:
        assert tuple(step.generated[:-1]) == step.memory
        return Next((*step.memory, step.token))

    run(request(way, Says(after, before, lambda _: ())))


def test_scores_logits_and_hidden_states_are_those_of_the_choice() -> None:
    seen: list[tuple[int, int]] = []

    def after(step: AfterStep) -> None:
        assert step.hidden.shape == (4,) and torch.equal(step.logits, step.scores)
        seen.append((step.token, int(step.scores.argmax())))

    (found,) = run(request("greedy", Says(after)))
    assert [token for token, _ in seen] == list(found.tokens)
    assert all(token == best for token, best in seen)


def test_drafts_that_are_given_the_right_thing_are_taken() -> None:
    """A hook that looks at positions alone costs no draft."""

    def before(step: BeforeStep) -> Mapping[str, Tensor]:
        left = torch.tensor([step.request.max_length - place for place in step.positions])
        return {"embeds": step.embeds + left[:, None] * 0.5}

    taken = []
    for hooks in ((), (Says(before=before),)):
        words = Says(lambda step: Next(force=(1, 2, 3, 4) * 4) if step.position == 11 else None)
        at = engine()
        run(request("prompt lookup", *hooks, words), at)
        taken.append(at.counts.accepted)
    assert min(taken) > 4


def test_drafts_that_were_given_something_else_are_not_taken() -> None:
    """The words are guessed rightly, but the memory after each gives other embeddings."""
    words = Says(lambda step: Next(force=(1, 2, 3, 4) * 2) if step.position == 11 else None)
    for murmur in (Murmur(1, 0, 0, scored=True), CALM):
        same_as_its_textbook(request("prompt lookup", words, replace(murmur, forces=0)))


def test_a_hooks_neighbours_keep_their_drafts() -> None:
    alone, together = engine(), engine()
    run(request("prompt lookup"), alone)
    going = Drive(together)
    going.submit(request("prompt lookup", request_id="plain"))
    going.submit(request("prompt lookup", CALM, drafter=PromptLookup(4)))
    going.finish()
    assert together.counts.accepted >= alone.counts.accepted > 0


def test_inputs_that_the_model_declares_are_given_by_name() -> None:
    """In the place of the prompt's own, where a hook gives them."""
    inputs = (
        InputSpec("box", "token", (2,), torch.float32),
        InputSpec("tone", "row", (1,), torch.float32),
    )
    prompt = Prompt(ids=PROMPT, inputs={"box": torch.ones(len(PROMPT), 2)})

    def before(step: BeforeStep) -> Mapping[str, Tensor]:
        given = {"tone": torch.tensor([float(step.start > 0)])}
        return given if step.start == 12 else {**given, "box": torch.zeros(step.count, 2)}

    hook = Says(before=before, gives=("box", "tone"))
    whole = run(request("beams", hook, prompt=prompt), engine(inputs=inputs))
    assert whole == run(request("beams", hook, prompt=prompt), engine(budget=5, inputs=inputs))
    bare = replace(prompt, inputs={})
    assert whole == run(request("beams", hook, prompt=bare), engine(inputs=inputs))
    assert whole != run(request("beams", prompt=bare), engine(inputs=inputs))


class Noting(HashExecutor):
    """Notes, of every feed, the stretches for which it is given a box, and how many positions."""

    def __init__(self, inputs: tuple[InputSpec, ...]) -> None:
        super().__init__(VOCABULARY, inputs=inputs)
        self.fed: list[tuple[list[tuple[int, int]], int]] = []

    def run(self, work: Work) -> StepOutput:
        for feed, extra in work.extras.items():
            given = [(first, len(values)) for name, first, values in extra.inputs if name == "box"]
            self.fed.append((given, int(work.counts[feed])))
        return super().run(work)


def test_what_is_given_position_by_position_is_fed_as_one() -> None:
    def before(step: BeforeStep) -> Mapping[str, Tensor]:
        return {"box": torch.full((step.count, 2), float(step.start))}

    inputs = (InputSpec("box", "token", (2,), torch.float32),)
    executor = Noting(inputs)
    at = Engine(executor, Continuous(256, max_rows=64))
    going = Drive(at)
    going.submit(request("greedy", Says(before=before, gives=("box",)), stops=(MaxLength(22),)))
    for _ in range(8):
        going.step()
    at.preempt(going.groups["greedy"])  # so that all is fed again
    going.finish()
    assert all(given == [(0, count)] for given, count in executor.fed)
    assert sum(count > 1 for _, count in executor.fed) == 2


# --- mutants --------------------------------------------------------------------------------------


def noticed() -> bool:
    """Whether the tests above notice that something is wrong."""
    try:
        for way in ("greedy", "sampling", "draft model"):
            test_every_way_to_choose_equals_its_textbook(way, (BUSY,))
        test_a_preemption_before_every_step_changes_nothing("beams")
        test_drafts_that_were_given_something_else_are_not_taken()
    except Exception:  # a defect may break a law or crash
        return True
    return False


@pytest.mark.parametrize("name", HOOK_MUTANTS)
def test_a_mutant_of_hooks_is_noticed(name: str) -> None:
    with HOOK_MUTANTS[name]():
        assert noticed()


def test_nothing_is_noticed_without_a_mutant() -> None:
    assert not noticed()
