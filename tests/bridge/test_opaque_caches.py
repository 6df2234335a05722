"""Caches with state that the bridge does not know: a row has one to itself, and forks copy it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.bridge.foreign import Foreign
from everystep.bridge.trial import examine
from tests.bridge.families import FAMILIES, model_of


@cache
def compressing() -> Any:
    """A model whose layers compress what they have read, four positions at a time and more."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "deepseek_v4",
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_lora_rank=8,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=4,
        sliding_window=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
}


@pytest.mark.parametrize("name", CALLS)
def test_forks_of_such_a_cache_are_those_of_transformers(name: str) -> None:
    model, read = compressing(), torch.randint(3, 90, (2, 11))
    given = {**CALLS[name], "max_new_tokens": 14, "eos_token_id": None, "do_sample": False}
    expected = model.generate(read, attention_mask=torch.ones_like(read), **given)
    assert torch.equal(es.wrap(model).generate(read, **given), expected)


def test_several_samples_go_on_from_one_prompt() -> None:
    model, read = es.wrap(compressing()), torch.randint(3, 90, (1, 11))
    given = {"max_new_tokens": 12, "eos_token_id": None}
    drawn = {"do_sample": True, "num_return_sequences": 3, "seed": 4}
    first = model.generate(read, top_k=1, **drawn, **given)
    assert torch.equal(first, model.generate(read, do_sample=False, **given).expand(3, -1))
    assert len(set(map(tuple, model.generate(read, **drawn, **given).tolist()))) == 3


def test_rows_of_such_a_cache_are_not_cut_shown_or_shared() -> None:
    found = examine(Foreign(compressing()))
    assert found.opaque
    assert not (found.cuts or found.ragged or found.exports)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_caches_of_other_families_are_known(name: str) -> None:
    assert not examine(Foreign(model_of(name))).opaque
