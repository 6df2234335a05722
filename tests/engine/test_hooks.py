"""Hooks: what they give, force, stop and remember is that of a plain loop, whatever comes between.

Random hooks are part of the mixes that the laws are tried on; here are the cases one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from everystep.draws import SeededDraws
from everystep.engine import Continuous, DraftModel, Engine, Lockstep, PromptLookup, audit
from everystep.errors import EverystepError, InvariantError, RequestError
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.testing.drive import Run, result
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.testing.rules import Murmur
from everystep.testing.textbook import Hypothesis, generate
from everystep.types import AfterStep, BeforeStep, InputSpec, Next, Prompt, PromptMoment, Request
from everystep.types.protocols import Hook
from tests.engine.mutants import HOOK_MUTANTS
from tests.engine.test_interrupts import Interrupt, Tripwire

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
    "diverse beams": {"strategy": Beam(4, returns=4, max_new=NEW, searches=2, diversity=0.5)},
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
    going = Run(at or engine())
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
    going = Run(at)
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
        going, wire = Run(engine()), Tripwire(line)
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

    going = Run(engine())
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
        left = torch.tensor([step.max_length - place for place in step.positions])
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
    going = Run(together)
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


# --- errors ---------------------------------------------------------------------------------------

E = FUNCTION.embed_dim
NONSENSE: dict[str, tuple[Hook, str]] = {
    "not a mapping": (Says(before=lambda step: [step.embeds]), "mapping"),
    "not a tensor": (Says(before=lambda step: {"embeds": 3}), "a tensor"),
    "too few": (Says(before=lambda step: {"embeds": torch.zeros(0, E)}), "shape"),
    "too wide": (Says(before=lambda step: {"embeds": torch.zeros(step.count, 9)}), "shape"),
    "whole numbers": (
        Says(before=lambda step: {"embeds": torch.zeros(step.count, E).long()}),
        "floating",
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
    going = Run(Engine(HashExecutor(VOCABULARY), scheduler()))
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
        error, going = KeyError("mine"), Run(engine())
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
