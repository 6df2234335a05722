"""Layers of wrapped models that see a window: what they hold for drafts, and give up without."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

import everystep as es
from everystep.bridge.sheets import Sheet, keep_spare
from everystep.engine import Continuous, Engine
from tests.bridge.families import model_of
from tests.judges.drive import Drive
from tests.requested import requested

WINDOW = 5


@cache
def windowed() -> Any:
    config = copy.deepcopy(model_of("mistral").config)
    config.sliding_window, config.eos_token_id = WINDOW, None
    model = transformers.MistralForCausalLM(config).to(torch.float64).eval()
    model.load_state_dict(model_of("mistral").state_dict())
    return model


def filled(count: int) -> Any:
    """A cache of the model that has recorded so many positions."""
    cache = DynamicCache(config=windowed().config)
    cache.activate_past_recording()
    with torch.no_grad():
        windowed()(torch.arange(count)[None] + 5, past_key_values=cache)
    return cache


@pytest.mark.parametrize("count", range(1, 12))
def test_what_was_spare_is_given_up_where_nothing_is_to_be_taken_back(count: int) -> None:
    cache = filled(count)
    held = [(layer.keys, layer.values) for layer in cache.layers]
    sheet = Sheet(cache, np.zeros(1, int), count, torch.ones(1, count), spare=2)
    keep_spare(sheet, 0)
    for layer, (keys, values) in zip(cache.layers, held, strict=True):
        least = min(count, WINDOW - 1)
        assert not layer.record_past
        assert torch.equal(layer.keys, keys[..., -least:, :])
        assert torch.equal(layer.values, values[..., -least:, :])
    assert sheet.spare == 0
    with torch.no_grad():  # as a model goes on that never recorded anything
        found = windowed()(torch.tensor([[9, 8]]), past_key_values=cache).logits
        ids = torch.cat([torch.arange(count) + 5, torch.tensor([9, 8])])[None]
        assert torch.allclose(found, windowed()(ids).logits[:, -2:], atol=1e-9)


def test_nothing_is_spare_without_drafts() -> None:
    model, recorded = windowed(), list[bool]()
    wrapped = es.wrap(model)

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        held = given.get("past_key_values")
        layers = [] if held is None else held.layers
        recorded.extend(layer.record_past for layer in layers)

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        ids = torch.arange(5, 16)[None]
        wrapped.generate(ids, max_new_tokens=5, prefill_chunk_size=4)
        assert recorded and not any(recorded)
        recorded.clear()
        wrapped.generate(ids, max_new_tokens=5, prompt_lookup_num_tokens=2)
        assert recorded
    finally:
        handle.remove()


@pytest.mark.parametrize("guesses", [1, 2, 4])
def test_rows_beside_those_with_drafts_have_none(guesses: int) -> None:
    """One forward feeds both; what is wrong of the drafts is taken back behind the window."""
    model, new = windowed(), 20
    rows = [[7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8], [5, 6, 10, 11, 12, 13, 14, 15, 16, 17, 18]]
    given = {"max_new_tokens": new, "do_sample": False}
    drafting = {
        "prompt_lookup_num_tokens": guesses,
        "num_assistant_tokens_schedule": "constant",
        "return_dict_in_generate": True,
    }
    out = es.wrap(model).generate(torch.tensor(rows), **given, **drafting)
    assert 0 < out.speculation["accepted"] < out.speculation["drafted"]
    for row, ids in enumerate(rows):
        expected = model.generate(torch.tensor([ids]), **given)
        assert out.sequences[row].tolist() == expected[0].tolist()


@pytest.mark.parametrize("lengths", [(2, 3), (3, 4), (9, 3), (4, 12)])
def test_rows_that_began_apart_meet_in_a_window(lengths: tuple[int, int]) -> None:
    """Each was fed alone, in a cache of its own; what they hold is put together by columns."""
    model = windowed()
    rows = [list(range(5 + n, 5 + n + length)) for n, length in enumerate(lengths)]
    wrapped = es.wrap(model)
    first, second = (
        replace(one, request_id=str(ids))
        for ids in rows
        for one in requested(wrapped, {"input_ids": torch.tensor([ids]), "max_new_tokens": 9})
    )
    run = Drive(Engine(wrapped.executor(first.needs), Continuous(64)))
    run.submit(first)
    run.step()
    run.submit(second)
    run.finish()
    for one, ids in zip((first, second), rows, strict=True):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=9, do_sample=False)
        assert [*ids, *run.results[one.request_id][0].tokens] == expected[0].tolist()
