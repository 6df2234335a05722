"""Several drafts of each sequence, verified together: the same tokens in fewer steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Continuous, DraftModel, Engine, Lockstep, PromptLookup, audit
from everystep.errors import OversizeError, RequestError
from everystep.executors.torch_executor import TorchExecutor
from everystep.stops.ends import MaxLength
from everystep.strategies import Greedy, Sample
from everystep.testing.hash_model import HashExecutor, HesitantExecutor
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.types import Prompt, Request
from everystep.types.request import Drafter
from tests.api.test_drafts import IDS, OUT, ROWS, WAYS, assistant, model
from tests.executors.models import family_model
from tests.executors.requests import ids, request
from tests.judges.drive import Drive

CONSTANT = {"num_assistant_tokens_schedule": "constant"}
FREE = {"assistant_confidence_threshold": 0.0, "num_assistant_tokens": 3, **CONSTANT}
DRAFTING: dict[str, Any] = {
    "assistant": lambda: {"assistant_model": assistant(), **FREE},
    "early layers": lambda: {"assistant_early_exit": 2, **FREE},
    "lookup": lambda: {"prompt_lookup_num_tokens": 3, **CONSTANT},
    "corpus": lambda: {"draft_corpus": corpus(), **CONSTANT},
    "as pays": lambda: {"assistant_model": assistant()},
}


@cache
def corpus() -> es.Corpus:
    """What the model says, and twice as often what it does not say at every fourth place."""
    said = model().generate(**ROWS)
    twisted = said.clone()
    twisted[:, IDS.shape[1] :: 4] += 1
    return es.Corpus([*twisted.tolist(), *twisted.tolist(), *said.tolist()])


@pytest.mark.few(2)
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("way", WAYS)
def test_several_drafts_change_nothing(way: str, drafting: str) -> None:
    options = {**ROWS, **WAYS[way], **OUT, "output_scores": True}
    plain = model().generate(**options)
    for number in (2, 4):
        drafted = model().generate(**options, **DRAFTING[drafting](), num_drafts=number)
        assert torch.equal(drafted.sequences, plain.sequences)
        if len(plain.scores) == len(drafted.scores):
            for one, other in zip(plain.scores, drafted.scores, strict=True):
                assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("drafting", ["assistant", "early layers"])
def test_several_drafts_are_right_for_longer(drafting: str) -> None:
    accepted = [
        model().generate(**ROWS, **OUT, **DRAFTING[drafting](), num_drafts=number).speculation
        for number in (1, 3)
    ]
    assert accepted[1]["accepted"] > accepted[0]["accepted"]


def test_a_drafter_that_hesitates_is_right_at_its_second_try() -> None:
    steps = [engine_after(number, Lockstep()).counts for number in (0, 1)]
    assert steps[1].steps < steps[0].steps and steps[1].accepted > steps[0].accepted
    assert steps[0].alternatives == 0 and steps[1].alternatives > 5


def engine_after(alternatives: int, scheduler: Lockstep | Continuous) -> Engine:
    """An engine that has run two requests of four sequences, and holds nothing any more."""
    engine = Engine(HashExecutor(30), scheduler)
    drafter = DraftModel(partial(HesitantExecutor, 30), 3, alternatives=alternatives)
    going = Drive(engine)
    for name, strategy in (("a", Greedy()), ("b", Sample(3))):
        one = request(name, strategy, Prompt(ids(len(name), 7) % 30), drafter=drafter)
        going.submit(replace(one, stops=(MaxLength(60),), max_length=60))
    while engine.pending:
        going.step()
        audit(engine)
    return engine


def test_rows_are_counted() -> None:
    """A request declares the rows of its alternatives, and never needs more."""
    found = engine_after(2, Continuous(64, 9)).counts
    assert found.alternatives > 5
    engine = Engine(HashExecutor(30, max_rows=9), Continuous(64, 8))
    drafter = DraftModel(partial(HesitantExecutor, 30), 3, alternatives=2)
    with pytest.raises(OversizeError, match="num_drafts"):
        engine.submit(request("b", Sample(3), Prompt(ids(2, 4) % 30), drafter=drafter))


@pytest.mark.parametrize("drafts", [HesitantExecutor, partial(HashExecutor, embed_dim=3)])
def test_only_a_draft_that_went_further_is_counted(drafts: Any) -> None:
    """Right at its second try, or hardly ever: of equals the first draft is taken."""
    engine = Engine(HashExecutor(30), Lockstep())
    going = Drive(engine)
    drafter = DraftModel(partial(drafts, 30), 3, alternatives=2)
    for name in "abc":
        one = request(name, Greedy(), Prompt(ids(ord(name), 7) % 30), drafter=drafter)
        going.submit(replace(one, stops=(MaxLength(40),), max_length=40))
    going.finish()
    counts, tokens = engine.counts, 3 * 33
    # Each of these brought at least one token more, and the others brought one alone.
    assert counts.alternatives <= counts.long_children <= counts.accepted < tokens
    assert counts.alternatives > 5


@pytest.mark.parametrize("family", ["mistral", "mamba"])
def test_rows_that_forget_may_have_several_drafts(family: str) -> None:
    made = family_model(
        family, **({"sliding_window": 5} if family == "mistral" else {"state_size": 4})
    )

    def tokens(drafter: Drafter | None) -> list[list[int]]:
        going = Drive(Engine(TorchExecutor(made), Lockstep()))
        going.submit(request("a", Greedy(), Prompt(ids(1, 17)), drafter=drafter))
        going.submit(request("b", Sample(2), Prompt(ids(2, 6)), drafter=drafter))
        going.finish()
        return sorted(done.tokens.tolist() for g in going.groups.values() for done in g.done)

    wanted = tokens(None)
    for drafter in (
        PromptLookup(3, alternatives=2),
        DraftModel(partial(TorchExecutor, made), 3, alternatives=2),
    ):
        assert tokens(drafter) == wanted


class Leaning(es.Hook):
    """Adds what follows from the last token to the embedding, so that every draft has its own."""

    gives = ("embeds",)

    def on_prompt(self, moment: Any) -> int:
        return 0

    def before_step(self, step: Any) -> dict[str, Tensor]:
        return {"embeds": step.embeds + 0.01 * step.memory}

    def after_step(self, step: Any) -> Any:
        return es.Next(memory=step.token % 7)


BESIDE: dict[str, Any] = {
    "companions": {"guidance_scale": 1.5},
    "likelihoods": {"logprobs": 2},
    "an amateur": {"amateur_model": lambda: tiny_llama(seed=5, num_hidden_layers=1)},
    "layers": {"dola_layers": "low"},
    "hooks": {"hooks": [Leaning()]},
    "hidden states": {"output_hidden_states": True, "output_attentions": True},
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_the_logits_is_there_for_every_draft(name: str) -> None:
    beside = {key: value() if callable(value) else value for key, value in BESIDE[name].items()}
    options = {**ROWS, **OUT, **beside}
    drafting = {"assistant_model": assistant(), **FREE, "num_drafts": 3}
    plain, drafted = model().generate(**options), model().generate(**options, **drafting)
    assert torch.equal(plain.sequences, drafted.sequences)
    assert drafted.speculation["accepted"] > 0
    if name == "likelihoods":
        for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
            assert torch.allclose(one.logprobs, other.logprobs, atol=1e-5)
    if name == "hidden states":
        for one, other in zip(plain.hidden_states, drafted.hidden_states, strict=True):
            assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(one, other, strict=True))


def test_a_run_shows_the_draft_that_went_on() -> None:
    asked = {"max_new_tokens": 24, "eos_token_id": None, "output_hidden_states": True}
    prompt = IDS[0].tolist()
    plain = es.open(model(), None, prompt, **asked).result()
    drafting = {"assistant_model": assistant(), **FREE, "num_drafts": 4}
    run = es.open(model(), None, prompt, **asked, **drafting)
    said: list[int] = []
    for step in run:
        assert step.logits is not None and len(step.logits) == len(step.tokens)
        assert step.logits.argmax(dim=-1).tolist() == list(step.tokens)
        (branch,) = step.branches
        assert branch.tokens == step.tokens
        said += step.tokens
    assert said == [*plain.tokens] == [*run.result().tokens]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True, "assistant_model": assistant}, "seed"),
        ({"do_sample": True, "prompt_lookup_num_tokens": 3}, "seed"),
        (
            {"do_sample": True, "seed": 1, "assistant_model": assistant,
             "draft_verification": "rejection"},
            "rejection",
        ),
        ({"assistant_model": assistant, "assistant_ensemble_weight": 0.5}, "ensemble"),
    ],
)  # fmt: skip
def test_drafts_whose_choices_differ_are_one(options: dict[str, Any], words: str) -> None:
    given = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(RequestError, match=words):
        model().generate(**ROWS, **given, num_drafts=2)


def test_an_assistant_with_another_tokenizer_makes_one_draft() -> None:
    other: LanguageModel = tiny_llama(vocab_size=290, seed=2)
    pair = {"assistant_model": other, "assistant_tokenizer": tiny_tokenizer(290)}
    with pytest.raises(RequestError, match="one draft"):
        tiny_llama(vocab_size=320).generate(
            IDS, tokenizer=tiny_tokenizer(320), max_new_tokens=2, **pair, num_drafts=2
        )


def test_without_a_drafter_it_says_so() -> None:
    with pytest.warns(UserWarning, match="num_drafts has no effect"):
        model().generate(**ROWS, num_drafts=2)


def test_requests_name_how_many() -> None:
    one: Request = request("a", Greedy(), Prompt(ids(1, 3)), drafter=PromptLookup(alternatives=3))
    engine = Engine(HashExecutor(30), Lockstep())
    assert engine.submit(one).rows == 4
