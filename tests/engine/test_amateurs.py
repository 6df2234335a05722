"""Contrastive decoding by two models: the definition, every face, and what the amateur's rows go
through."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.draws import SeededDraws
from everystep.engine import (
    Continuous,
    Contrast,
    DraftModel,
    Engine,
    Lockstep,
    PromptLookup,
    audit,
)
from everystep.engine.amateurs import Amateurs
from everystep.engine.drafting import Drafters
from everystep.errors import EverystepError
from everystep.stops.ends import EosToken, MaxLength
from everystep.strategies import Beam, Contrastive, Greedy, Sample
from everystep.testing.hash_function import HashFunction
from everystep.testing.hash_model import HashExecutor
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Prompt, Request, StepOutput, Work
from everystep.types.protocols import Predictions
from tests.api.runs import take
from tests.executors.models import family_model
from tests.judges.drive import run_together
from tests.judges.textbook import generate

IDS = [5, 6, 7, 8, 9]
SIZE = 30
QUIET: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.2},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "penalised": {"repetition_penalty": 1.3},
    "best of": {"do_sample": True, "best_of": 3},
}


@pytest.fixture(scope="module")
def expert() -> LanguageModel:
    return LanguageModel(family_model("llama"), executor="torch")


@pytest.fixture(scope="module")
def amateur(expert: LanguageModel) -> LanguageModel:
    smaller = tiny_llama(vocab_size=expert.vocab_size, hidden_size=8, seed=3)
    return smaller.to(dtype=expert.dtype)


def contrasted(p: Tensor, q: Tensor, alpha: float, beta: float) -> Tensor:
    """By its definition: (V,) probabilities of both -> scores."""
    plausible = p >= alpha * p.max()
    return torch.where(plausible, p.log() - beta * q.log(), -torch.inf)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.8])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_tokens_are_those_of_a_loop_without_a_cache(
    expert: LanguageModel, amateur: LanguageModel, alpha: float, beta: float
) -> None:
    asked = {**QUIET, "amateur_model": amateur, "contrast_alpha": alpha, "contrast_beta": beta}
    (found,) = es.generate(expert, None, [IDS], **asked)
    ids = [*IDS]
    for _ in range(10):
        p, q = (
            m(torch.tensor([ids])).logits[0, -1].double().softmax(-1) for m in (expert, amateur)
        )
        ids.append(int(contrasted(p, q, alpha, beta).argmax()))
    assert found == ids[len(IDS) :]


def test_it_chooses_otherwise_than_the_expert_alone(
    expert: LanguageModel, amateur: LanguageModel
) -> None:
    plain = es.generate(expert, None, [IDS], **QUIET)
    assert es.generate(expert, None, [IDS], amateur_model=amateur, **QUIET) != plain
    # Nothing is plausible but the best.
    strict = {"amateur_model": amateur, "contrast_alpha": 1.0}
    assert es.generate(expert, None, [IDS], **strict, **QUIET) == plain


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_face_and_batch_finds_the_same(
    expert: LanguageModel, amateur: LanguageModel, name: str, tmp_path: Path
) -> None:
    options = {**QUIET, **STRATEGIES[name], "amateur_model": amateur, "contrast_alpha": 0.02}
    kept = {**options, "return_dict_in_generate": True, "seed": [3]}
    (alone,) = es.generate(expert, None, [IDS], **kept)
    wanted = [one.tokens for one in (alone if isinstance(alone, list) else [alone])]
    others = [[9, 9], IDS, [4, 5, 6, 7, 4, 5, 6]]
    together = es.generate(expert, None, others, **{**kept, "seed": [1, 3, 2]})[1]
    assert together == alone
    with es.stream(expert, None, [IDS], **options, seed=[3]) as stream:
        assert [*stream]
        assert [one.tokens for one in stream.results()[0]] == wanted
    run = es.open(expert, None, IDS, **options, seed=[3])
    take(run, 3)
    run.save(tmp_path / "a.run")
    twin = run.fork()
    again = es.resume(tmp_path / "a.run", expert, amateur_model=amateur)
    assert again.result() == twin.result() == run.result()
    result = run.result()
    assert [one.tokens for one in (result if isinstance(result, list) else [result])] == wanted
    padded = torch.tensor([[0, 0, *IDS], [4, 5, 6, 7, 4, 5, 6]])
    out = expert.generate(
        padded, attention_mask=(padded != 0).long(), **options, seed=[3, 2],
        return_dict_in_generate=True,
    )  # fmt: skip
    assert [tuple(one) for one in out.new_tokens[: len(wanted)]] == wanted


def test_a_run_is_rewound_and_explained(expert: LanguageModel, amateur: LanguageModel) -> None:
    asked = {**QUIET, "amateur_model": amateur}
    run = es.open(expert, None, IDS, **asked)
    wanted = es.open(expert, None, IDS, **asked).result().tokens
    take(run, 5)
    run.rewind(3)
    why = run.explain(1)
    assert [one.name for one in why.effects] == ["contrast"] and why.chosen.token == wanted[1]
    step = take(run, 1)[0]
    assert [change.name for change in step.changes] == ["contrast"]
    assert run.result().tokens == wanted


REGEX = r"[ab]{2,5}( the| and){1,4}c?"
CHOICES = ["yes", "no", "perhaps the"]
GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"choices": CHOICES}, "|".join(CHOICES)),
    "regex": ({"regex": REGEX}, REGEX),
}
"""What is asked for, and what texts of it match, by Python's own expressions."""


@pytest.mark.parametrize("alpha", [0.02, 1.0])
@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {"best of"}))
@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_grammar_means_the_same_beside_an_amateur(kind: str, name: str, alpha: float) -> None:
    grammar, expected = GRAMMARS[kind]
    size: dict[str, Any] = {"vocab_size": 320, "max_position_embeddings": 256}
    model, smaller = tiny_llama(hidden_size=16, **size), tiny_llama(3, hidden_size=8, **size)
    asked = {**grammar, **STRATEGIES[name], "max_new_tokens": 100, "seed": 5}
    beside = {**asked, "amateur_model": smaller, "contrast_alpha": alpha}
    prompts = ["Hi", "Tell the truth", "a"]
    for given in (asked, beside):
        for found in es.generate(model, tiny_tokenizer(320), prompts, **given):
            texts = [found] if isinstance(found, str) else found
            assert texts and [one for one in texts if not re.fullmatch(expected, one)] == []


def test_an_amateur_chooses_among_the_texts_of_a_grammar() -> None:
    size: dict[str, Any] = {"vocab_size": 320, "max_position_embeddings": 256}
    model, smaller = tiny_llama(hidden_size=16, **size), tiny_llama(3, hidden_size=8, **size)
    asked = {"choices": CHOICES, "max_new_tokens": 100}
    prompts = ["Hi", "Tell the truth", "a", "was", "the"]
    alone = es.generate(model, tiny_tokenizer(320), prompts, **asked)
    beside = es.generate(model, tiny_tokenizer(320), prompts, **asked, amateur_model=smaller)
    assert alone != beside and {*alone, *beside} <= {*CHOICES}


# --- on the hash model ----------------------------------------------------------------------------


def request(strategy: Any, name: str = "a", **more: Any) -> Request:
    readout = Contrast(partial(HashExecutor, SIZE, 3), 0.1, 0.5)
    return Request(
        name, Prompt(ids=np.array([3, 4, 5, 3, 4, 5, 3])), strategy, SeededDraws(5),
        stops=(EosToken((1,)), MaxLength(19)), readout=readout, max_length=19, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "strategy", [Greedy(), Sample(3), Beam(3, 2), Contrastive(3, 0.6)], ids=lambda one: str(one)[:6]
)
@pytest.mark.parametrize("drafter", [None, PromptLookup(4)], ids=["plain", "drafted"])
def test_every_strategy_is_its_textbook(strategy: Any, drafter: Any) -> None:
    own = request(strategy, drafter=drafter if strategy.reads.alone else None)
    run = run_together([own, replace(own, request_id="b")], HashExecutor(SIZE))
    book = generate(own, HashFunction(SIZE, 4))
    assert [one.tokens for one in run.results["a"]] == [one.tokens for one in book]
    assert run.results["a"] == run.results["b"]
    assert run.engine.guests.held() == 0


def test_equal_amateurs_read_all_rows_at_once() -> None:
    one = request(Sample(2))
    same = [replace(one, request_id=name) for name in ("a", "b", "c")]
    run = run_together(same, HashExecutor(SIZE))
    amateurs = run.engine.guests.find(Amateurs)
    assert amateurs is not None
    (rows,) = amateurs.at_work.values()
    assert rows.executor.counts["forwards"] <= run.engine.counts.forwards  # type: ignore[attr-defined]


def test_a_preempted_group_is_read_again_and_a_cancelled_one_leaves_nothing() -> None:
    own = request(Beam(3, 2))
    wanted = run_together([own], HashExecutor(SIZE)).results["a"]
    engine = Engine(HashExecutor(SIZE), Continuous())
    group, other = engine.submit(own), engine.submit(replace(own, request_id="b"))
    for _ in range(4):
        engine.step()
    engine.preempt(group)
    assert engine.guests.held() == 3
    engine.step()
    audit(engine)
    engine.cancel(other)
    while engine.pending:
        engine.step()
    found = [done.tokens.tolist() for done in own.strategy.finish(group)]
    assert found == [[*one.tokens] for one in wanted]
    assert engine.guests.held() == 0
    audit(engine)


@dataclass
class Failing:
    """An amateur that breaks down when it is given this id."""

    inner: Any
    at: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, work: Work) -> StepOutput:
        if self.at in work.tokens:
            raise ValueError("no such id")
        return self.inner.run(work)


def test_an_amateur_that_fails_ends_its_request_alone() -> None:
    def opened() -> Any:
        return Failing(HashExecutor(SIZE, 3), 29)

    readout = Contrast(opened, 0.1, 0.5)
    good = replace(request(Greedy(), "good"), readout=readout)
    bad = replace(good, request_id="bad", prompt=Prompt(ids=np.array([3, 29])))
    other = replace(request(Sample(2), "other"), readout=None)
    alone = run_together([good, other], HashExecutor(SIZE)).results
    engine = Engine(HashExecutor(SIZE), Lockstep())
    groups = [engine.submit(one) for one in (good, bad, other)]
    while engine.pending:
        engine.step()
    assert isinstance(groups[1].error, ValueError)
    for group, name in ((groups[0], "good"), (groups[2], "other")):
        found = [tuple(done.tokens.tolist()) for done in group.request.strategy.finish(group)]
        assert found == [one.tokens for one in alone[name]]
    audit(engine)


@pytest.mark.parametrize("strategy", [Greedy(), Contrastive(3, 0.6)], ids=["greedy", "contrastive"])
def test_an_amateur_that_fails_once_costs_nobody_what_others_remember(strategy: Any) -> None:
    """Rows of draft models are freed, and hidden states stay."""
    calls = []

    class Once(HashExecutor):
        def run(self, work: Work) -> StepOutput:
            calls.append(work)
            if len(calls) == 4:
                raise ValueError("not now")
            return super().run(work)

    drafter = DraftModel(partial(HashExecutor, SIZE, 5), 2) if strategy.reads.alone else None
    one = replace(request(strategy), readout=Contrast(partial(Once, SIZE, 3), 0.1, 0.5))
    one = replace(one, drafter=drafter)
    wanted = [made.tokens for made in generate(one, HashFunction(SIZE, 4))]
    engine = Engine(HashExecutor(SIZE), Lockstep())
    groups = [engine.submit(replace(one, request_id=name)) for name in "ab"]
    while engine.pending:
        engine.step()
        audit(engine)
    for group in groups:
        found = [tuple(done.tokens.tolist()) for done in strategy.finish(group)]
        assert group.error is None and found == wanted
    assert len(calls) > 4


def test_of_many_amateurs_and_drafters_those_go_that_nobody_uses() -> None:
    def own(name: str) -> Request:
        return request(Greedy(), name, drafter=DraftModel(partial(HashExecutor, SIZE, 5), 2))

    engine, last = Engine(HashExecutor(SIZE), Continuous()), own("last")
    for name in map(str, range(40)):
        engine.submit(own(name))
    while engine.pending:
        engine.step()
    amateurs, drafters = engine.guests.find(Amateurs), engine.guests.find(Drafters)
    assert amateurs is not None and drafters is not None
    assert len(amateurs.at_work) == len(drafters.at_work) == 40
    group = engine.submit(last)  # it holds no rows yet
    while engine.pending:
        engine.step()
        audit(engine)
    assert [*amateurs.at_work] == [last.readout]
    assert [*drafters.at_work] == [last.drafter]
    found = [tuple(done.tokens.tolist()) for done in last.strategy.finish(group)]
    assert found == [one.tokens for one in generate(last, HashFunction(SIZE, 4))]


# --- what is refused ------------------------------------------------------------------------------


def test_the_plausible_are_those_near_the_best() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.7, 0.1, 0.1, 0.1])
    said = Predictions(p.log()[None], [q.log()[None]])
    found = Contrast(lambda: HashExecutor(SIZE), 0.2, 1.0).mix(said)[0]
    assert found.isneginf().tolist() == [False, False, False, True]
    assert float(found[1]) == pytest.approx(math.log(3))
    assert int(found.argmax()) == 1


def wrong(expert: LanguageModel) -> dict[str, tuple[dict[str, Any], str]]:
    small = tiny_llama(vocab_size=expert.vocab_size, hidden_size=8)
    other = tiny_llama(vocab_size=expert.vocab_size + 1, hidden_size=8)
    embeds = torch.zeros(4, expert.width)
    return {
        "another vocabulary": ({"amateur_model": other}, "another vocabulary"),
        "no model": ({"amateur_model": "small"}, "no model of this library"),
        "alpha": ({"amateur_model": small, "contrast_alpha": 0.0}, "contrast_alpha"),
        "beta": ({"amateur_model": small, "contrast_beta": -1.0}, "contrast_beta"),
        "alone": ({"contrast_beta": 1.0}, "a model that is not given"),
        "guided": ({"amateur_model": small, "guidance_scale": 2.0}, "guidance_scale"),
        "embeds": ({"amateur_model": small, "prompt": {"inputs_embeds": embeds}}, "ids alone"),
        "prefix": (
            {"amateur_model": small, "prefix": es.prefill(expert, prompt=[3, 4])}, "ids alone"
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    "case",
    ["another vocabulary", "no model", "alpha", "beta", "alone", "guided", "embeds", "prefix"],
)
def test_what_cannot_be_is_refused(expert: LanguageModel, case: str) -> None:
    given, said = wrong(expert)[case]
    prompt = given.pop("prompt", IDS)
    with pytest.raises(EverystepError, match=said):
        es.generate(expert, None, [prompt], **given, **QUIET)
