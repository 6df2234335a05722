"""Positions that have embeddings: they are counted as transformers counts them, up to the last."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import everystep as es
from everystep.errors import RequestError
from everystep.executors.native import NativeExecutor
from everystep.executors.torch_executor import TorchExecutor
from everystep.types import Extra, Verb, Work
from tests.executors.members import members
from tests.judges.numpy_executor import NumpyExecutor
from tests.models.tiny import farthest, ids, ours, reference_decoder, with_norms

MOST = 64
KINDS = ["gpt2", "opt"]
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize(("executor", "threads"), [("torch", 1), ("native", 1), ("native", 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_position_is_read(kind: str, executor: Any, threads: int) -> None:
    """The last token is chosen and not fed; a guess does not go on behind it either."""
    torch.manual_seed(1)  # of the usual seed two tokens are equally good in the end
    reference = with_norms(reference_decoder(kind, torch.float32))
    with members(threads):
        model = es.LanguageModel(ours(reference), executor=executor)
        prompts = ids(2, 9)
        prompts[0, :4] = 0
        given = {"attention_mask": (prompts > 0).long(), **OPTIONS}
        given["max_new_tokens"] = MOST + 1 - 9
        expected = reference.generate(prompts, **given)
        assert torch.equal(model.generate(prompts, **given), expected)


@pytest.mark.parametrize("asked", [{"max_new_tokens": MOST}, {"max_length": MOST + 2}])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_beyond_it_is_refused_before_it_runs(kind: str, asked: dict[str, int]) -> None:
    model = es.LanguageModel(ours(reference_decoder(kind, torch.float32)))
    wanted = "learned embeddings of 64 positions.*at most 56 new tokens.*Lower max_new_tokens"
    with pytest.raises(RequestError, match=wanted):
        model.generate(ids(1, 9), **asked, **OPTIONS)
    assert model.generate(ids(1, 9), max_new_tokens=56, **OPTIONS).shape == (1, MOST + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_sent_count_too(kind: str) -> None:
    model = es.LanguageModel(ours(reference_decoder(kind, torch.float32)))
    run = es.open(model, None, [5, 6, 7], max_new_tokens=8, eos_token_id=None)
    next(run), next(run)
    with pytest.raises(RequestError, match="learned embeddings of 64 positions"):
        run.send([8] * 55)
    assert len(run.tokens) == 2 and run.given == ()
    run.send([8] * 54)
    assert 3 + len(run.result().tokens) == MOST + 1


def test_an_assistant_has_to_reach_as_far() -> None:
    model = es.LanguageModel(ours(reference_decoder("llama", torch.float32)))
    assistant = es.LanguageModel(ours(reference_decoder("gpt2", torch.float32)))
    options = {"assistant_model": assistant, **OPTIONS}
    with pytest.raises(RequestError, match="assistant_model learned embeddings of 64 positions"):
        model.generate(ids(1, 9), max_new_tokens=100, **options)
    assert model.generate(ids(1, 9), max_new_tokens=20, **options).shape == (1, 29)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_forward_beyond_it_is_refused(kind: str) -> None:
    model, read = ours(reference_decoder(kind, torch.float64)), ids(1, 5)
    for call in (
        lambda: model.forward(ids(1, MOST + 1)),
        lambda: model.forward(read, position_ids=torch.arange(MOST - 4, MOST + 1)[None]),
        lambda: model.forward(read, position_ids=torch.arange(-1, 4)[None]),
    ):
        with pytest.raises(RequestError, match="positions 0 to 63"):
            call()
    assert model.forward(ids(1, MOST)).shape == (1, MOST, 97)


def test_opt_counts_the_positions_that_its_mask_leaves() -> None:
    reference = with_norms(reference_decoder("opt", torch.float64))
    model, read, mask = ours(reference), ids(3, 12), torch.ones(3, 12, dtype=torch.int64)
    mask[0, :5] = mask[1, -3:] = mask[2, 4:6] = 0
    with torch.no_grad():
        expected = reference(read, attention_mask=mask, use_cache=False).logits
    assert farthest(model.forward(read, mask)[mask > 0], expected[mask > 0]) < 1e-10
    cache = es.DynamicCache()
    parts = [model.forward(read[:, :7], mask[:, :7], cache=cache)]
    parts.append(model.forward(read[:, 7:], mask, cache=cache))
    assert farthest(torch.cat(parts, 1)[mask > 0], expected[mask > 0]) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
def test_given_positions_are_those_of_the_embeddings(kind: str) -> None:
    """Everywhere: in the plain forward and in every executor."""
    reference = with_norms(reference_decoder(kind, torch.float32))
    model, read = ours(reference), ids(1, 6)
    places = torch.tensor([[3, 4, 5, 9, 20, 63]])
    given = {"attention_mask": torch.ones(1, 6).long(), "position_ids": places}
    with torch.no_grad():
        expected = reference(read, **given, use_cache=False).logits[0]
    found = model.forward(read, **given)[0]
    assert farthest(found, expected) < 1e-5
    count = np.array([6])
    work = Work((Verb("allocate", 0),), np.array([0]), np.array([0]), count, count, read[0].numpy())
    for kind_of in (TorchExecutor, NativeExecutor, NumpyExecutor):
        executor = kind_of(model)
        with pytest.raises(RequestError, match="positions 0 to 63"):
            executor.run(with_places(work, places + 1))
        assert farthest(executor.run(with_places(work, places)).logits, expected) < 1e-5


def with_places(work: Work, places: torch.Tensor) -> Work:
    """The work, whose only feed stands at these positions."""
    fields = (work.verbs, work.rows, work.starts, work.counts, work.logits, work.tokens)
    return Work(*fields, extras={0: Extra(positions=places)})
