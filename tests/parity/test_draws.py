"""Draws are what their numbers say, cover what they should, and the models are what they seem."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.parity.draws import draw
from tests.parity.models import CATALOGUE, pair
from tests.parity.options import MODES, OPTIONS
from tests.parity.text import own_tokenizer, spellings, their_tokenizer

DRAWS = [draw(number) for number in range(3000)]
SOME = ("max_new_tokens", "max_length", "num_return_sequences", "return_dict_in_generate")
FLAGS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "inputs_embeds")
PASSED = ("past_key_values", "decoder_input_ids")
SPECIAL = ("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id")
HEALED = ("token_healing",)
LOOKUP = ("prompt_lookup_num_tokens", "max_matching_ngram_size")


def test_a_draw_is_determined_by_its_number() -> None:
    assert draw(17) == draw(17)


@pytest.mark.parametrize(
    "name",
    [
        *(option.name for option in OPTIONS),
        *SOME,
        *FLAGS,
        *OBJECTS,
        *PASSED,
        *SPECIAL,
        *LOOKUP,
        *HEALED,
    ],
)
def test_every_setting_is_used_in_a_twentieth_of_the_draws(name: str) -> None:
    assert sum(name in one.used() for one in DRAWS) >= 0.05 * len(DRAWS)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_drawn(mode: str) -> None:
    assert sum(one.shape.mode == mode for one in DRAWS) >= 0.08 * len(DRAWS)


@pytest.mark.parametrize("model", CATALOGUE)
def test_every_model_is_drawn(model: str) -> None:
    assert sum(one.model == model for one in DRAWS) >= 0.05 * len(DRAWS)


def test_padding_stands_on_either_side_and_under_no_mask() -> None:
    kinds = Counter((one.padding, one.masked) for one in DRAWS if one.ragged)
    assert min(kinds[side, masked] for side in ("left", "right") for masked in (True, False)) > 50


@pytest.mark.parametrize("size", sorted({tiny.vocabulary for tiny in CATALOGUE.values()}))
def test_both_tokenizers_have_the_models_tokens_and_agree(size: int) -> None:
    mine, theirs = own_tokenizer(size), their_tokenizer(size)
    assert sorted(mine.get_vocab().values()) == list(range(size))
    text = "".join(spellings(size))
    assert mine.encode(text) == theirs.encode(text)
    assert mine.decode(range(size)) == theirs.decode(range(size))


def test_prompts_that_are_healed_are_what_their_text_encodes_to() -> None:
    healed = [one for one in DRAWS if "token_healing" in one.used()]
    for one in healed:
        tokenizer = own_tokenizer(one.shape.vocabulary)
        for prompt in one.prompts:
            assert tuple(tokenizer.encode(tokenizer.decode(prompt))) == prompt
        assert len({*map(len, one.prompts)}) == 1


DECODERS = [name for name, tiny in CATALOGUE.items() if not tiny.encodes]


@pytest.mark.parametrize("model", CATALOGUE)
def test_a_model_chooses_different_tokens(model: str) -> None:
    """A model whose choice never varies would agree with any other."""
    vocabulary = CATALOGUE[model].vocabulary
    ids = torch.randint(vocabulary, (8, 8), generator=torch.Generator().manual_seed(1))
    behind = {"decoder_input_ids": ids.flip(0)} if CATALOGUE[model].encodes else {}
    with torch.no_grad():
        chosen = pair(model).reference(ids, **behind).logits.argmax(-1)
    assert len(chosen.unique()) >= vocabulary // 3


@pytest.mark.parametrize("model", DECODERS)
def test_the_replaced_attention_is_the_references_own(model: str) -> None:
    reference = pair(model).reference
    ids, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        exact = reference(ids, attention_mask=mask).logits
        reference.set_attn_implementation("sdpa")
        own = reference(ids, attention_mask=mask).logits
        reference.set_attn_implementation("exact")
    assert torch.allclose(exact[mask == 1], own[mask == 1], rtol=0, atol=1e-12)
