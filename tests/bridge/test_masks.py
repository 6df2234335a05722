"""Which forwards of a wrapped model are given a mask of columns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import everystep as es
from tests.bridge.families import model_of

IDS = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
COUNT = 5


class Own(type(model_of("llama"))):  # type: ignore[misc]
    """A class of the caller's, which may make of a mask what it likes."""


def masks_seen(model: nn.Module, ids: Tensor, mask: Tensor) -> list[bool]:
    """Whether each forward of a call was given one."""
    wrapped, seen = es.wrap(model), []  # what it can do is found out before anybody listens
    handle = model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given.get("attention_mask") is not None),
        with_kwargs=True,
    )
    try:
        wrapped.generate(
            ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, eos_token_id=None
        )
    finally:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "opt"])
def test_rows_without_padding_need_one_for_their_prompts_alone(name: str) -> None:
    model = model_of(name)
    assert masks_seen(model, IDS[1:], MASK[1:]) == [True, *[False] * (COUNT - 1)]
    assert masks_seen(model, IDS, MASK) == [True] * COUNT


def test_a_class_of_the_callers_gets_it_every_time() -> None:
    model = Own(copy.deepcopy(model_of("llama").config)).eval()
    assert masks_seen(model, IDS[1:], MASK[1:]) == [True] * COUNT


def test_positions_that_jump_are_one_sequence() -> None:
    """Without a mask transformers reads a prompt with such positions as several."""
    model = model_of("llama")
    places = torch.tensor([[0, 1, 5, 6]])
    asked = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None}
    found = es.wrap(model).generate(IDS[1:], position_ids=places, **asked)
    whole = torch.cat([places, torch.arange(7, 7 + COUNT - 1)[None]], dim=1)
    for stop in range(4, 4 + COUNT):
        mask = torch.ones(1, stop, dtype=torch.int64)
        given = {"position_ids": whole[:, :stop], "attention_mask": mask}
        with torch.no_grad():
            logits = model(input_ids=found[:, :stop], **given).logits[0, -1]
        assert int(logits.argmax()) == int(found[0, stop])


@pytest.mark.parametrize("beams", [1, 2])
def test_a_mask_of_pairs_hides_from_each_position_what_it_says(beams: int) -> None:
    """Generated positions see what the last one of the prompt sees."""
    model, length = model_of("llama"), 4
    shown = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    shown[0, 0, 2:, 1] = shown[1, 0, 3, 0] = False
    asked = {"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": None, "num_beams": beams}
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    wrapped = es.wrap(model)
    found = wrapped.generate(ids, attention_mask=shown, **asked)
    assert not torch.equal(found, wrapped.generate(ids, **asked))
    for row in range(2):
        alone = wrapped.generate(ids[row : row + 1], attention_mask=shown[row : row + 1], **asked)
        assert torch.equal(alone, found[row : row + 1])
    if beams > 1:
        return
    for row in range(2):
        for stop in range(length, length + COUNT):
            whole = torch.ones(stop, stop, dtype=torch.bool).tril()
            for at in range(stop):
                whole[at, :length] &= shown[row, 0, min(at, length - 1)]
                whole[at, at] = True
            added = torch.zeros(1, 1, stop, stop, dtype=model.dtype)
            added.masked_fill_(~whole, torch.finfo(model.dtype).min)
            with torch.no_grad():
                given = {"attention_mask": added, "position_ids": torch.arange(stop)[None]}
                logits = model(input_ids=found[row : row + 1, :stop], **given).logits[0, -1]
            assert int(logits.argmax()) == int(found[row, stop])
