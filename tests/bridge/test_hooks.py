"""Hooks on models of transformers: a signal at every step, beside transformers' own `generate`.

transformers reads the same signal through a forward hook of torch on a copy of the model.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import everystep as es
from tests.bridge.families import model_of

IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 10, 11, 12, 21]])
NEW = 8
TOTAL = IDS.shape[1] + NEW
QUIET: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "uncached": {"num_beams": 2, "use_cache": False},
}
FAMILIES = ("llama", "gemma2", "gpt2")


def signal(left: Tensor, width: int) -> Tensor:
    """(..., n) numbers of positions that are left -> (..., n, E)."""
    return 4 * torch.cos(left.double()[..., None] * torch.arange(1, width + 1))


@dataclass(frozen=True)
class Left(es.Hook):
    """Adds to every embedding how many positions are left, which it counts down itself."""

    gives: tuple[str, ...] = ("embeds",)

    def on_prompt(self, prompt: es.PromptMoment) -> int:
        return prompt.request.max_length - prompt.request.prompt.length

    def before_step(self, step: es.BeforeStep) -> dict[str, Tensor]:
        left = torch.arange(step.count - 1, -1, -1) + step.memory + 1
        return {"embeds": step.embeds + signal(left, step.embeds.shape[1]).to(step.embeds)}

    def after_step(self, step: es.AfterStep) -> es.Next:
        return es.Next(memory=step.memory - 1)


def told(name: str) -> Any:
    """A copy of the model, which reads the signal wherever it is called."""
    model = copy.deepcopy(model_of(name))
    inner, table = model.base_model, model.get_input_embeddings()

    def before(module: Any, args: Any, given: dict[str, Any]) -> Any:
        embeds = table(args[0] if args else given.pop("input_ids"))
        past, count = given.get("past_key_values"), embeds.shape[1]
        start = 0 if past is None else past.get_seq_length()
        left = TOTAL - torch.arange(start, start + count)
        given["inputs_embeds"] = embeds + signal(left, embeds.shape[-1]).to(embeds)
        return (), given

    inner.register_forward_pre_hook(before, with_kwargs=True)
    return model


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_signal_is_read_as_the_reference_reads_it(name: str, call: str) -> None:
    model, given = model_of(name), {**QUIET, **CALLS[call]}
    mask = torch.ones_like(IDS)
    expected = told(name).generate(IDS, attention_mask=mask, **given)
    assert not torch.equal(expected, model.generate(IDS, attention_mask=mask, **given))
    found = es.wrap(model).generate(IDS, attention_mask=mask, hooks=[Left()], **given)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("beams", [1, 3])
def test_prompts_streams_runs_and_the_engine_too(beams: int) -> None:
    model, given = model_of("llama"), {**QUIET, "num_beams": beams}
    mask = torch.ones_like(IDS)
    expected = told("llama").generate(IDS, attention_mask=mask, **given)[:, IDS.shape[1] :].tolist()
    asked = {"hooks": [Left()], **given}
    assert es.generate(model, None, IDS.tolist(), **asked) == expected
    with es.stream(model, None, IDS.tolist(), **asked) as stream:
        assert [*stream] and [list(one.tokens) for (one,) in stream.results()] == expected
    runs = [es.open(model, None, ids, **asked) for ids in IDS.tolist()]
    assert [list(run.result().tokens) for run in runs] == expected

    async def main() -> Any:
        async with es.AsyncEngine(model, max_rows=2 * beams) as engine:
            return await asyncio.gather(*(engine.generate(i, **asked) for i in IDS.tolist()))

    assert asyncio.run(main()) == expected


def test_what_a_model_does_not_read_is_refused() -> None:
    class Boxes(es.Hook):
        gives = ("bbox",)

    for call in (es.generate, es.open):
        with pytest.raises(es.EverystepError, match="bbox"):
            call(model_of("llama"), None, IDS[0].tolist(), hooks=[Boxes()], **QUIET)
    with pytest.raises(es.EverystepError, match="embeds"):
        es.generate(model_of("bart"), None, IDS[0].tolist(), hooks=[Left()], **QUIET)
