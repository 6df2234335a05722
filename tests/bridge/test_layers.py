"""What layers of a wrapped model show, and what its rows leave behind, is what transformers has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from tests.bridge.families import END, PAD, model_of

ROWS = ([5, 9, 23, 31, 7, 9], [12, 9, 6, 12])
IDS = torch.tensor([[PAD] * (6 - len(row)) + row for row in ROWS])
SHOWN: dict[str, Any] = {
    "max_new_tokens": 5,
    "do_sample": False,
    "suppress_tokens": [END],
    "output_attentions": True,
    "output_hidden_states": True,
    "return_dict_in_generate": True,
}


def near(found: Any, expected: Any) -> None:
    """Tuples of tuples of tensors that agree; what is found may have more before it."""
    assert len(found) == len(expected)
    for own, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            own = own[(..., *(slice(-size, None) for size in theirs.shape[1:]))]
            torch.testing.assert_close(own, theirs, rtol=0, atol=1e-9)
        else:
            near(own, theirs)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_decoder_shows_its_layers(name: str) -> None:
    model = copy.deepcopy(model_of(name))  # other tests have the same
    model.set_attn_implementation("eager")
    found = es.wrap(model).generate(IDS, attention_mask=(IDS != PAD).long(), **SHOWN)
    for number, row in enumerate(ROWS):
        # Alone: in float64 its eager attention makes nan of padding.
        expected = model.generate(torch.tensor([row]), **SHOWN)
        assert found.sequences[number, -5:].tolist() == expected.sequences[0, -5:].tolist()
        for what in ("attentions", "hidden_states"):
            own = [[layer[number, None] for layer in step] for step in found[what]]
            near(own, expected[what])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_both_sides_show_their_layers(name: str) -> None:
    model = copy.deepcopy(model_of(name))  # other tests have the same
    model.set_attn_implementation("eager")
    ids = torch.tensor([ROWS[0], [*ROWS[1], 8, 11]])
    expected = model.generate(ids, **SHOWN)
    found = es.wrap(model).generate(ids, **SHOWN)
    assert torch.equal(found.sequences, expected.sequences)
    for what in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        near(found[what], expected[what])


def test_a_row_that_was_cut_back_leaves_what_it_read() -> None:
    """Its end stands in the middle of a draft, so that positions behind it were fed too."""
    model, said = model_of("llama"), [5, 9, 23, 31, 12, 39, 12, 28]
    wrapped = es.wrap(model)
    asked = {"max_new_tokens": 9, "eos_token_id": 0, "return_dict_in_generate": True}
    ids = torch.tensor([said + said])
    plain = wrapped.generate(ids, **asked)
    drafted = wrapped.generate(ids, prompt_lookup_num_tokens=6, **asked)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert ids.shape[1] < plain.sequences.shape[1] < ids.shape[1] + 9
    with torch.no_grad():
        expected = model(plain.sequences[:, :-1], use_cache=True).past_key_values
    for own, theirs in zip(drafted.past_key_values, expected, strict=True):
        for one, other in zip(own[:2], theirs[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_generated_positions_have_the_last_type_of_the_prompt() -> None:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=40, n_positions=32, pad_token_id=PAD
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).to(torch.float64).eval()
    with torch.no_grad():
        model.transformer.wte.weight.mul_(40.0)
    ids, types = torch.tensor([[5, 9, 23, 7]]), torch.tensor([[11, 11, 30, 2]])
    asked = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
    expected = model.generate(ids, token_type_ids=types, **asked)
    assert torch.equal(es.wrap(model).generate(ids, token_type_ids=types, **asked), expected)
    others = torch.tensor([[11, 11, 2, 30]])
    assert not torch.equal(model.generate(ids, token_type_ids=others, **asked), expected)
