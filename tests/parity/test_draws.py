"""Draws are what their numbers say, cover what they should, and the models are what they seem."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import transformers

from everystep.config.fields import FIELDS
from tests.parity.draws import Draw, draw
from tests.parity.models import CATALOGUE, TINIES, pair
from tests.parity.options import MODES
from tests.parity.test_random_settings import ALL_BLOCKS, PER_BLOCK
from tests.parity.text import own_tokenizer, spellings, their_tokenizer
from tests.reading import ROOT

PAGE = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
THEIRS = {*vars(transformers.GenerationConfig()), *transformers.GenerationConfig().to_dict()}
ALL = ALL_BLOCKS * PER_BLOCK
AMOUNTS = [3000, pytest.param(ALL, marks=pytest.mark.slow)]
DRAWS = [draw(number) for number in range(3000)]
PASSED = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "inputs_embeds",
    "past_key_values",
    "decoder_input_ids",
    "negative_prompt_ids",
)


def _undrawn() -> list[str]:
    """The fields that the page gives a reason for."""
    table = PAGE.split("## Fields that are not drawn")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [name for cell in rows for name in re.findall(r"`(\w+)`", cell)]


def _away(one: Draw) -> set[str]:
    """Everything that is away from its default, also where it is set to it."""
    same = {name for name, field in FIELDS.items() if one.settings.get(name) == field.default}
    return one.used() - same


def test_a_draw_is_determined_by_its_number() -> None:
    assert draw(17) == draw(17)


def test_every_field_is_drawn_or_has_a_reason_not_to_be() -> None:
    drawn = set().union(*map(_away, DRAWS)) & THEIRS
    undrawn = _undrawn()
    assert sorted([*drawn, *undrawn]) == sorted(THEIRS)
    assert f"{len(drawn)} of {len(THEIRS)} fields of transformers' configuration are drawn" in PAGE


@pytest.mark.parametrize("amount", AMOUNTS)
def test_every_setting_is_used_in_a_twentieth_of_the_draws(amount: int) -> None:
    used = Counter(name for number in range(amount) for name in _away(draw(number)))
    wanted = THEIRS.difference(_undrawn()).union(PASSED)
    assert {name: used[name] for name in wanted if used[name] < 0.05 * amount} == {}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_drawn(mode: str) -> None:
    assert sum(one.shape.mode == mode for one in DRAWS) >= 0.08 * len(DRAWS)


@pytest.mark.parametrize("model", CATALOGUE)
def test_every_model_is_drawn(model: str) -> None:
    assert sum(one.model == model for one in DRAWS) >= 0.05 * len(DRAWS)


def test_padding_stands_on_either_side_and_under_no_mask() -> None:
    kinds = Counter((one.padding, one.masked) for one in DRAWS if one.ragged)
    assert min(kinds[side, masked] for side in ("left", "right") for masked in (True, False)) > 50


@pytest.mark.parametrize("size", sorted({tiny.vocabulary for tiny in TINIES.values()}))
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


DECODERS = [name for name, tiny in TINIES.items() if not tiny.encodes]


@pytest.mark.parametrize("model", TINIES)
def test_a_model_chooses_different_tokens(model: str) -> None:
    """A model whose choice never varies would agree with any other."""
    vocabulary = TINIES[model].vocabulary
    ids = torch.randint(vocabulary, (8, 8), generator=torch.Generator().manual_seed(1))
    behind = {"decoder_input_ids": ids.flip(0)} if TINIES[model].encodes else {}
    with torch.no_grad():
        chosen = pair(model).reference(ids, **behind).logits.argmax(-1)
    assert len(chosen.unique()) >= vocabulary // 3


@pytest.mark.parametrize("model", DECODERS)
def test_the_replaced_attention_is_the_references_own(model: str) -> None:
    reference = pair(model).reference
    ids, mask = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    # Fused attention knows no caps of scores. The eager one rounds to float32, and gives nan for
    # padding that sees nothing.
    capped = TINIES[model].config.get("attn_logit_softcapping") is not None
    mask[0, :2] = int(capped)
    with torch.no_grad():
        exact = reference(ids, attention_mask=mask).logits
        reference.set_attn_implementation("eager" if capped else "sdpa")
        own = reference(ids, attention_mask=mask).logits
        reference.set_attn_implementation("exact")
    bound = 1e-5 if capped else 1e-12
    assert torch.allclose(exact[mask == 1], own[mask == 1], rtol=0, atol=bound)
