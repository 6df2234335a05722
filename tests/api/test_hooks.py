"""A signal that enters at every step, under every way to choose: each call equals a plain loop.

The loop computes the logits of a whole prefix anew for every token, from embeddings to which the
signal was added; it knows no cache, no batch and no hook.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import everystep as es
from everystep.api.model import LanguageModel
from everystep.engine import Continuous, DraftModel, Engine, Lockstep
from everystep.engine.hooks import HOOKED
from everystep.errors import EverystepError, UnsupportedError
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.strategies import Contrastive, DiverseBeam, Greedy, Sample
from everystep.strategies.classic import BankedBeams
from everystep.testing.hash_function import HashFunction
from everystep.types import Extra, Given, Request, Verb, Work
from tests.executors.layout import layout_model
from tests.executors.models import family_model, narrow_model
from tests.judges.drive import result
from tests.judges.textbook import (
    Hypothesis,
    Prefix,
    beam_search,
    contrastive,
    follow,
    sample,
)
from tests.judges.textbook_beams import banked_beams
from tests.requested import requested

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
NEW = 12
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"num_beams": 3, "do_sample": True, "top_k": 0},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 4},
}


def signal(left: Tensor, width: int) -> Tensor:
    """(n,) numbers of positions that are left -> (n, E)."""
    return torch.cos(left.double()[:, None] * torch.arange(1, width + 1)) * 0.5


@dataclass(frozen=True)
class Remaining(es.Hook):
    """Adds to every embedding how many positions are left."""

    gives: tuple[str, ...] = ("embeds",)

    def before_step(self, step: es.BeforeStep) -> dict[str, Tensor]:
        left = torch.tensor([step.request.max_length - place for place in step.positions])
        embeds = step.embeds
        return {"embeds": embeds + signal(left, embeds.shape[1]).to(embeds)}


@cache
def model(native: bool = False) -> LanguageModel:
    core = narrow_model("llama", None) if native else family_model("llama")
    return LanguageModel(core, executor="native" if native else "torch")


@dataclass(frozen=True)
class Loop(Prefix):
    """The prefix of a real model, whose embeddings have the signal."""

    model: LanguageModel | None = None

    def scores_beside(self, tokens: list[int], chosen: list[int] | None) -> Tensor:
        logits = self.model.core.forward(None, inputs_embeds=self._embeds(tokens)[None])[0, -1]
        logits = logits.detach().float()
        return logits.log_softmax(-1) if self.request.strategy.reads.scores != "logits" else logits

    def hidden(self, tokens: list[int]) -> Tensor:
        embeds = self._embeds(tokens)
        one, count = np.array([1]), np.array([len(embeds)])
        extras = {0: Extra((Given("embeds", 0, embeds),), hidden=True)}
        nothing = np.full(len(embeds), -1)
        work = Work((Verb("allocate", 0),), one - 1, one - 1, count, one, nothing, extras)
        return TorchExecutor(self.model.core).run(work).answers[0].hidden

    def _embeds(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([*self.request.prompt.ids.tolist(), *tokens])
        embeds = self.model.core.network.embed(ids).detach()
        left = self.request.max_length - torch.arange(len(ids))
        return embeds + signal(left, embeds.shape[1]).to(embeds)


def requests_of(lm: LanguageModel, call: dict[str, Any]) -> tuple[Request, ...]:
    return requested(lm, {"input_ids": IDS, **call})


def book(lm: LanguageModel, asked: Request) -> list[Hypothesis]:
    prefix = Loop(replace(asked, hooks=()), HashFunction(lm.vocab_size), model=lm)
    strategy = asked.strategy
    if isinstance(strategy, Greedy):
        return [follow(prefix, lambda scores, _: int(scores.argmax()))]
    if isinstance(strategy, Sample):
        return [sample(prefix, index) for index in range(strategy.width)]
    if isinstance(strategy, Contrastive):
        return [contrastive(prefix, strategy)]
    if isinstance(strategy, BankedBeams):
        return banked_beams(prefix, strategy)
    return beam_search(prefix, strategy)


def asked_for(name: str, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "seed": 3, "hooks": [Remaining()], **CALLS[name], **more}


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.native)])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_equals_the_plain_loop(name: str, native: bool) -> None:
    lm, call = model(native), asked_for(name)
    expected = [list(one.tokens) for one in book(lm, requests_of(lm, call)[0])]
    rows = lm.generate(IDS, return_dict_in_generate=True, **call)
    assert rows.new_tokens == expected
    plain = lm.generate(IDS, return_dict_in_generate=True, **{**call, "hooks": None})
    assert plain.new_tokens != expected
    uncached = lm.generate(IDS, return_dict_in_generate=True, use_cache=False, **call)
    assert uncached.new_tokens == expected
    chunks = lm.generate(IDS, return_dict_in_generate=True, prefill_chunk_size=3, **call)
    assert chunks.new_tokens == expected
    many = es.generate(lm, None, [IDS[0].tolist(), [1, 2, 3]], **call)[0]
    assert (many if isinstance(many[0], list) else [many]) == expected
    if not name.endswith("beams"):
        events = list(es.stream(lm, None, [IDS[0].tolist()], **call))
        assert [e.token for e in events if e.index == 0 and e.token >= 0] == expected[0]


@pytest.mark.parametrize("drafts", [1, 4])
@pytest.mark.parametrize("scheduler", [Lockstep, lambda: Continuous(16, max_rows=16)])
def test_a_draft_model_and_diverse_beams_too(scheduler: Any, drafts: int) -> None:
    lm = model()
    (plain,) = requests_of(lm, asked_for("greedy"))
    other = partial(TorchExecutor, family_model("qwen2"))
    for asked in (
        replace(plain, drafter=DraftModel(partial(TorchExecutor, lm.core), drafts)),
        replace(plain, drafter=DraftModel(other, drafts)),
        replace(plain, strategy=DiverseBeam(4, returns=4, max_new=NEW)),
    ):
        engine = Engine(TorchExecutor(lm.core), scheduler())
        group = engine.submit(asked)
        while engine.pending:
            engine.step()
        found, expected = result(group), book(lm, asked)
        assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_padded_batch_equals_its_rows() -> None:
    lm = model()
    ids = torch.tensor([[0, 0, 0, 4, 9], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    both = lm.generate(ids, attention_mask=mask, pad_token_id=0, **asked_for("beams"))
    for row in (0, 1):
        own = ids[row : row + 1, mask[row].bool()]
        alone = lm.generate(own, pad_token_id=0, **asked_for("beams"))
        assert torch.equal(both[2 * row : 2 * row + 2, 5:], alone[:, own.shape[1] :])


def test_embeddings_as_a_prompt_are_what_a_hook_sees() -> None:
    lm = model()
    embeds = lm.get_input_embeddings()(IDS).detach()
    call = asked_for("greedy")
    call["max_new_tokens"] = NEW
    found = lm.generate(inputs_embeds=embeds, **call)
    assert torch.equal(found, lm.generate(IDS, **call)[:, IDS.shape[1] :])


class Boxes(es.Hook):
    """Gives every position a box, by where it stands."""

    gives = ("bbox",)

    def before_step(self, step: es.BeforeStep) -> dict[str, Tensor]:
        return {"bbox": torch.tensor([[place % 9, 1, 2, 3] for place in step.positions])}


def test_an_input_that_the_model_declares_is_given_by_name() -> None:
    lm = LanguageModel(layout_model(), executor="auto")
    call: dict[str, Any] = {"max_new_tokens": 6, "hooks": [Boxes()]}
    tokens: list[int] = IDS[0].tolist()
    for _ in range(6):
        boxes = torch.tensor([[place % 9, 1, 2, 3] for place in range(len(tokens))])
        count, one = np.array([len(tokens)]), np.array([1])
        extras = {0: Extra((Given("bbox", 0, boxes),))}
        verbs = (Verb("allocate", 0),)
        work = Work(verbs, one - 1, one - 1, count, one, np.array(tokens), extras)
        tokens.append(int(TorchExecutor(lm.core).run(work).logits.argmax()))
    assert lm.generate(IDS, **call)[0].tolist() == tokens
    assert es.generate(lm, None, [IDS[0].tolist()], **call)[0] == tokens[IDS.shape[1] :]


@pytest.mark.native
def test_the_native_executor_runs_hooks_that_give_embeddings() -> None:
    lm, taken = model(native=True), []
    run = NativeExecutor.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeExecutor, "run", lambda own, work: taken.append(1) or run(own, work))
        lm.generate(IDS, **asked_for("greedy"))
    assert taken
    with pytest.raises(UnsupportedError, match="native executor cannot run this"):
        lm.generate(IDS, max_new_tokens=2, hooks=[Boxes()])


class Counts(es.Hook):
    """Remembers the tokens, ends after the fourth, and makes the second a 9."""

    def on_prompt(self, moment: es.PromptMoment) -> tuple[int, ...]:
        return ()

    def after_step(self, step: es.AfterStep) -> es.Next:
        known = (*step.memory, step.token)
        return es.Next(known, [9] if len(known) == 1 else None, stop=len(known) == 4 and "four")


@pytest.mark.parametrize("name", CALLS)
def test_hooks_force_stop_and_remember(name: str) -> None:
    call = asked_for(name, hooks=[Counts()], return_dict_in_generate=True, eos_token_id=[])
    call.pop("eos_token_id")
    out = model().generate(IDS, **call)
    for tokens, reason in zip(out.new_tokens, out.finish_reasons, strict=True):
        assert len(tokens) == 4 and tokens[1] == 9
        assert reason.kind == "criteria" and reason.matched == "four"


def test_one_prompt_of_many_may_have_hooks_and_fail_alone() -> None:
    class Breaks(es.Hook):
        def on_prompt(self, moment: es.PromptMoment) -> None:
            raise ZeroDivisionError("mine")

    prompts, lm = [[1, 2, 3], [4, 5], [6]], model()
    options: list[dict[str, Any]] = [{}, {"hooks": [Breaks()]}, {"hooks": [Remaining()]}]
    found = es.generate(lm, None, prompts, options=options, max_new_tokens=4, on_error="return")
    assert found[0] == es.generate(lm, None, prompts[0], max_new_tokens=4)
    assert isinstance(found[1].finish_reason.matched, ZeroDivisionError)
    assert found[2] == es.generate(lm, None, prompts[2], max_new_tokens=4, hooks=[Remaining()])
    events = list(es.stream(lm, None, prompts, options=options, max_new_tokens=4))
    ends = {e.request_id: e.finish.kind for e in events if e.finish}
    assert ends == {"0": "length", "1": "error", "2": "length"}
    with pytest.raises(ZeroDivisionError):
        lm.generate(IDS, hooks=[Breaks()])


@pytest.mark.parametrize("hooks", [5, "ab", [Remaining], [lambda step: None], Remaining()])
def test_what_is_no_hook_is_refused(hooks: Any) -> None:
    with pytest.raises(EverystepError, match="hooks is not a list of hooks"):
        model().generate(IDS, hooks=hooks)
    with pytest.raises(EverystepError, match="hooks is not a list of hooks"):
        es.stream(model(), None, [[1, 2]], hooks=hooks)


def test_a_misspelt_keyword_is_no_hook() -> None:
    with pytest.raises(EverystepError, match="hooks instead of hook"):
        model().generate(IDS, hook=[Remaining()])


def test_a_loop_of_the_callers_does_not_drop_hooks() -> None:
    with pytest.raises(UnsupportedError, match="hooks"):
        model().generate(IDS, hooks=[Remaining()], custom_generate=lambda model, ids, **_: ids)


def test_no_hooks_leave_no_trace() -> None:
    (asked,) = requests_of(model(), {"max_new_tokens": 4})
    engine = Engine(TorchExecutor(model().core), Lockstep())
    group = engine.submit(asked)
    while engine.pending:
        assert all(HOOKED not in sequence.memo for sequence in group.live)
        engine.step()
