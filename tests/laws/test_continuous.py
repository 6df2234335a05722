"""Law 2 for the whole face: calls come out of the continuous scheduler as `generate` answers them.

Calls with random settings run alone through `model.generate`, in lockstep, and all rows of several
of them at once through the continuous scheduler: arriving at any step, fed in chunks, preempted,
beside neighbours that are cancelled. Tokens, reasons, scores and logprobs are compared.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.drivers.complete import completed
from everystep.drivers.rectangle import call_inputs
from everystep.engine.collect import Collector, kept_rows
from everystep.engine.logprobs import choice_logprobs, prompt_logprobs
from everystep.errors import EverystepError
from everystep.outputs import TokenLogprobs
from everystep.requests import absent
from everystep.requests.door import sort
from everystep.requests.prepare import prepare
from everystep.requests.reading import read_options
from everystep.types import FinishReason, Request
from tests.judges.dice import Dice
from tests.judges.drive import Drive, run_scheduled
from tests.judges.mixes import random_schedule
from tests.judges.mutants import MUTANTS
from tests.laws.calls import MODELS, Call, calls
from tests.parity.models import CATALOGUE, subject

# What many prompts cannot be asked for, or only in a rectangle.
ALONE = ("negative_prompt_ids", "min_length", *absent.ALONE)
PER_ROW = ("temperature", "repetition_penalty", "top_p")
TOGETHER = 4
PER_BLOCK = 80
DEFAULT_BLOCKS = 2
ALL_BLOCKS = 25
# Random settings are at times such that one of two has no effect.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BLOCKS = [
    *range(DEFAULT_BLOCKS),
    *(pytest.param(block, marks=pytest.mark.slow) for block in range(DEFAULT_BLOCKS, ALL_BLOCKS)),
]
# What every block must go through, so that the law is not kept for nothing.
FLOORS = {
    "greedy": 4,
    "sample": 8,
    "beam": 6,
    "beam_sample": 5,
    "contrastive": 1,
    "lookup": 1,
    "sampled lookup": 1,
    "cancelled": 1,
    "preemptions in decode": 25,
    "chunks": 100,
    "steps of scores": 1_500,
}
# What float32 numbers of equal logits can differ by where rows are summed in another order.
TOLERANCE = 2e-5


@dataclass
class Answer:
    """What a request comes to: one entry per returned sequence; `scores` per slot, by step.

    `late`: whether it is known at the end alone; its slots are other hypotheses than its results.
    """

    tokens: list[list[int]]
    reasons: list[FinishReason]
    values: list[float]
    scores: list[list[Tensor]]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    of_prompt: TokenLogprobs | None = None
    late: bool = False

    def steps(self, slot: int) -> int | None:
        """How many tokens were chosen in a slot, where slots are results."""
        alike = len(self.scores) == len(self.tokens) and not self.late
        return len(self.tokens[slot]) if alike else None


# --- in lockstep ----------------------------------------------------------------------------------


def offline(call: Call) -> list[Answer]:
    """The answers of `generate`, row by row."""
    out = subject(call.draw.model).generate(**call.arguments())
    returns = len(out.new_tokens) // call.draw.shape.batch
    return [_of_row(call, out, row, returns) for row in range(call.draw.shape.batch)]


def _of_row(call: Call, out: Any, row: int, returns: int) -> Answer:
    own = slice(row * returns, (row + 1) * returns)
    slots = range(row * call.width, (row + 1) * call.width)
    values = getattr(out, "sequences_scores", None)
    return Answer(
        tokens=out.new_tokens[own],
        reasons=out.finish_reasons[own],
        values=[] if values is None else values[own].tolist(),
        scores=[[step[slot] for step in out.scores or ()] for slot in slots],
        logprobs=(out.logprobs or [])[own],
        of_prompt=out.prompt_logprobs[row] if out.prompt_logprobs else None,
        late=call.draw.shape.beamed,
    )


# --- continuously ---------------------------------------------------------------------------------


def requests_of(call: Call, name: str) -> list[Request]:
    """One request per row of the call, as `generate` would make them for a batch that goes on."""
    model = subject(call.draw.model)
    given = sort("rectangle", model, call.arguments())
    options = read_options(model, given, given.beside.tokenizer)
    inputs, past = call_inputs(model, given, options)
    made = completed(model, prepare(model, options, inputs, past)).requests
    return [replace(one, request_id=f"{name} {row}") for row, one in enumerate(made)]


@dataclass
class Mixture:
    """Calls of one model whose rows run together, and what became of them."""

    calls: dict[str, Call]
    requests: tuple[Request, ...]
    run: Drive
    collector: Collector

    @classmethod
    def of(cls, members: dict[str, Call], seed: int) -> Mixture:
        """The mixture, run under a random schedule."""
        requests = [one for name, call in members.items() for one in requests_of(call, name)]
        dice = Dice(np.random.default_rng([seed, 2]))
        schedule = random_schedule(tuple(requests), dice)
        width = max(one.strategy.width for one in requests)
        collector = Collector(len(requests) * width, width, scores=True)
        model = subject(next(iter(members.values())).draw.model)
        executor = model.executor(frozenset().union(*(one.needs for one in requests)))
        with torch.inference_mode():
            run = run_scheduled(tuple(requests), schedule, executor, (collector,))
        return cls(members, tuple(requests), run, collector)

    def answer(self, name: str, row: int) -> Answer:
        """What the row of a call came to."""
        group = self.run.groups[f"{name} {row}"]
        call, done = self.calls[name], group.request.strategy.finish(group)
        first = group.rank * self.collector.width
        slots = range(first, first + kept_rows(group.request.strategy))
        asked = "logprobs" in call.own
        return Answer(
            tokens=[one.tokens.tolist() for one in done],
            reasons=[one.reason for one in done],
            values=[one.score for one in done],
            scores=[self.collector.kept_scores[slot] for slot in slots],
            logprobs=[choice_logprobs(one.memo, len(one.tokens)) for one in done if asked],
            of_prompt=prompt_logprobs(group) if "prompt_logprobs" in call.own else None,
        )

    def cancelled(self, name: str, row: int) -> bool:
        """Whether it was ended from outside."""
        return f"{name} {row}" in self.run.cancelled


# --- compared -------------------------------------------------------------------------------------


def differences(expected: Answer, found: Answer) -> Iterator[str]:
    """What a schedule has changed, in words."""
    if found.tokens != expected.tokens:
        yield f"tokens {found.tokens} and not {expected.tokens}"
        return
    if list(map(_ended, found.reasons)) != list(map(_ended, expected.reasons)):
        yield f"reasons {found.reasons} and not {expected.reasons}"
    if expected.values and not _near(torch.tensor(found.values), torch.tensor(expected.values)):
        yield f"sequence scores {found.values} and not {expected.values}"
    yield from _steps(expected, found)
    told = [*expected.logprobs, expected.of_prompt], [*found.logprobs, found.of_prompt]
    if not all(map(_equally_likely, *told)):
        yield "other logprobs"


def _ended(reason: FinishReason) -> tuple[str, Any]:
    """Criteria are other objects on either side."""
    return reason.kind, None if reason.kind == "criteria" else reason.matched


def _steps(expected: Answer, found: Answer) -> Iterator[str]:
    """A batch that waits for its longest row has more steps than that row alone."""
    for slot, (left, right) in enumerate(zip(expected.scores, found.scores, strict=True)):
        if not left:
            return
        own = expected.steps(slot) or len(right)
        if not 0 < len(right) == own <= len(left):
            yield f"{len(right)} steps of {len(left)} in slot {slot}"
        for step, (one, other) in enumerate(zip(left, right, strict=False)):
            if not _near(one, other):
                yield f"other scores in slot {slot}, step {step}"
                return


def _near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _equally_likely(one: TokenLogprobs | None, other: TokenLogprobs | None) -> bool:
    if one is None or other is None:
        return one is other
    same = torch.equal(one.tokens, other.tokens) and torch.equal(one.top_tokens, other.top_tokens)
    return same and _near(one.logprobs, other.logprobs)


def beginnings(expected: Answer, found: Answer) -> Iterator[str]:
    """What was cancelled is the beginning of what it would have been, unless it decides late."""
    if expected.late:
        return
    for whole, cut in zip(expected.tokens, found.tokens, strict=False):
        if cut != whole[: len(cut)]:
            yield f"cancelled: {cut} and not the beginning of {whole}"


# --- the law --------------------------------------------------------------------------------------


def judged(number: int, tally: Counter[str]) -> list[str]:
    """What differs in the mixture of this number; counts what it went through."""
    model = random.Random(f"mixture {number}").choice(MODELS)
    known: dict[str, Call] = {}
    answers: dict[str, list[Answer]] = {}
    for place, call in enumerate(calls(model, 100 * number, TOGETHER)):
        tally["settings"] += 1
        try:
            answers[str(place)] = offline(call)
            known[str(place)] = call
            tally[call.kind] += 1
        except EverystepError as error:
            tally["refused"] += 1
            assert isinstance(error, ValueError | TypeError), call
    mixture = Mixture.of(known, number)
    _note(mixture, tally)
    problems = []
    for name, rows in answers.items():
        for row, expected in enumerate(rows):
            compare = beginnings if mixture.cancelled(name, row) else differences
            for problem in compare(expected, mixture.answer(name, row)):
                problems.append(f"{known[name]}\nrow {row}: {problem}")
    return problems


def _note(mixture: Mixture, tally: Counter[str]) -> None:
    counts = mixture.run.engine.counts
    tally["requests"] += len(mixture.requests)
    tally["cancelled"] += len(mixture.run.cancelled)
    tally["chunks"] += counts.chunks
    tally["preemptions in decode"] += counts.preemptions_in_decode
    tally["drafts accepted"] += counts.accepted
    tally["steps of scores"] += sum(map(len, mixture.collector.kept_scores))


@pytest.mark.parametrize("block", BLOCKS)
def test_continuous_equals_offline(block: int, record_property: Callable[[str, Any], None]) -> None:
    tally: Counter[str] = Counter()
    problems = []
    for number in range(block * PER_BLOCK // TOGETHER, (block + 1) * PER_BLOCK // TOGETHER):
        problems += judged(number, tally)
    record_property("continuous", dict(tally))
    assert not problems, "\n\n".join(problems)
    assert {name: tally[name] for name, floor in FLOORS.items() if tally[name] < floor} == {}
    assert tally["refused"] <= PER_BLOCK // 20


def of_texts(call: Call) -> dict[str, Any]:
    """What of the call can be asked for many prompts: nothing of one rectangle, or of one row."""
    settings = {n: v for n, v in call.draw.settings.items() if n not in ALONE}
    return {n: v for n, v in settings.items() if n not in PER_ROW or not isinstance(v, list)}


DECODERS = [name for name in MODELS if not CATALOGUE[name].encodes]


@pytest.mark.parametrize("model", DECODERS)
def test_many_prompts_equal_calls(model: str) -> None:
    for call in calls(model, 50_000, 8):
        prompts, settings = [list(ids) for ids in call.draw.prompts], of_texts(call)
        spelled = call.own["tokenizer"]
        seeds = list(range(len(prompts)))
        many = es.generate(subject(model), spelled, prompts, seed=seeds, **settings)
        for prompt, seed, found in zip(prompts, seeds, many, strict=True):
            given = {"tokenizer": spelled, "seed": seed, **settings}
            alone = subject(model).generate(torch.tensor([prompt]), **given)
            listed = found if isinstance(found, list) else [found]
            # A rectangle is filled up where a search came to fewer hypotheses.
            first, filled = alone.new_tokens[: len(listed)], alone.new_tokens[len(listed) :]
            assert [list(one.tokens) for one in listed] == first and not any(filled), call


def test_draws_that_depend_on_neighbours_are_found() -> None:
    with MUTANTS["order-dependent draw"]():
        assert any(judged(number, Counter()) for number in range(3))
