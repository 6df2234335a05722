"""Rows of a model that reads how long its neighbours are share no rectangle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import everystep as es

SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "long_factor": [4.0, 3.0, 2.0, 6.0],
        "short_factor": [1.0, 1.0, 1.0, 1.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.filterwarnings("ignore:.*beyond what the model was made for")
@pytest.mark.parametrize("name", SCALINGS)
def test_a_short_row_beside_a_long_one_is_as_it_is_alone(name: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16 if name == "dynamic" else 64,
        rope_parameters={"rope_theta": 100.0, **SCALINGS[name]},
        initializer_range=0.4,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    wrapped, read = es.wrap(model), torch.randint(3, 60, (2, 30))
    mask = torch.ones_like(read)
    mask[0, :25] = 0
    together = wrapped.generate(read, attention_mask=mask, max_new_tokens=6, pad_token_id=0)
    for row, start in ((0, 25), (1, 0)):
        own = read[row : row + 1, start:]
        expected = model.generate(own, max_new_tokens=6, attention_mask=torch.ones_like(own))
        assert together[row, start:].tolist() == expected[0].tolist()


@pytest.mark.filterwarnings("ignore:.*cannot be cut|.*shows no")
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_rows_of_sparse_attention_share_no_rectangle(kind: str) -> None:
    """Past `index_topk` positions each reads a choice of them, which padding would take part in."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=60,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=8,
        index_n_heads=2,
        index_head_dim=16,
        first_k_dense_replace=1,
        initializer_range=0.4,
        eos_token_id=None,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    wrapped, read = es.wrap(model), torch.randint(3, 60, (2, 20))
    mask = torch.ones_like(read)
    mask[0, :17] = 0
    together = wrapped.generate(read, attention_mask=mask, max_new_tokens=6, pad_token_id=0)
    for row, start in ((0, 17), (1, 0)):
        own = read[row : row + 1, start:]
        expected = model.generate(own, max_new_tokens=6, attention_mask=torch.ones_like(own))
        assert together[row, start:].tolist() == expected[0].tolist()
