"""Weights come in and go out under the names and values of the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from everystep.models import build_model, convert_model, named_weights
from tests.executors.models import SPECS, random_model
from tests.models.tiny import (
    ENCODER_DECODERS,
    Tensors,
    ids,
    ours,
    reference_decoder,
    reference_pair,
    reference_t5,
)

TIED = {
    "lm_head.weight",
    "embed_out.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
}


def references(dtype: torch.dtype) -> list[PreTrainedModel]:
    every: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    return [
        reference_decoder("llama", dtype, **every),
        reference_decoder("qwen2", dtype, tie_word_embeddings=True),
        reference_t5(dtype, feed_forward_proj="gated-gelu"),
        reference_decoder("gpt2", dtype),
        reference_decoder("gpt_neox", dtype),
        reference_decoder("falcon", dtype, new_decoder_architecture=True, num_kv_heads=2),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index", range(6))
def test_what_went_in_comes_out(index: int, dtype: torch.dtype) -> None:
    reference = references(dtype)[index]
    given = reference.state_dict()
    found = dict(named_weights(ours(reference)))
    given |= {"embed_out.weight": given.get("lm_head.weight")}  # as GPT-NeoX is saved
    assert set(given) - set(found) <= TIED
    assert all(torch.equal(given[name], tensor) for name, tensor in found.items())


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
def test_what_goes_into_an_encoder_and_a_decoder_comes_out(kind: str) -> None:
    reference = reference_pair(kind, torch.float32)
    given, model = reference.state_dict(), ours(reference)
    for one in (model, convert_model(model, learns=True), convert_model(model)):
        found = dict(named_weights(one))
        copies = {name.rpartition(".")[0].rpartition(".")[2] for name in set(given) - set(found)}
        assert copies <= {"embed_tokens", "lm_head", "proj_out"}
        assert all(torch.equal(given[name], tensor) for name, tensor in found.items())


def test_fused_parts_are_views_of_one_tensor() -> None:
    found = dict(named_weights(ours(reference_decoder("llama", torch.float64))))
    parts = [found[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_a_model_does_not_share_memory_with_its_source() -> None:
    reference = reference_decoder("llama", torch.float64)
    model, read = ours(reference), ids(1, 5)
    before = model.forward(read)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.zero_()
    assert torch.equal(model.forward(read), before)


def test_conversion_leaves_the_original() -> None:
    model, read = ours(reference_decoder("llama", torch.float32)), ids(1, 5)
    before = model.forward(read)
    wider = convert_model(model, dtype=torch.float64)
    assert wider.dtype == torch.float64
    assert torch.allclose(wider.forward(read).float(), before, atol=1e-3)
    assert torch.equal(model.forward(read), before)


@pytest.mark.parametrize("name", SPECS)
def test_every_tensor_of_a_spec_has_a_name_of_its_own(name: str) -> None:
    model = random_model(SPECS[name])
    found = [part for part, _ in named_weights(model)]
    assert len(found) == len(set(found))
    read = ids(1, 9, 40)
    assert torch.equal(convert_model(model).forward(read), model.forward(read))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({}, torch.float32),
    ],
)
def test_without_a_type_the_configuration_decides(values: dict[str, str], expected: Any) -> None:
    reference = reference_decoder("llama", torch.float32)
    config = {**reference.config.to_dict(), "dtype": None, **values}
    assert build_model(config, Tensors(reference.state_dict())).dtype == expected


def test_absent_values_take_the_familys_defaults() -> None:
    reference = reference_decoder("llama", torch.float32)
    config = reference.config.to_dict()
    for key in ("rms_norm_eps", "hidden_act", "max_position_embeddings", "tie_word_embeddings"):
        del config[key]
    model = build_model(config, Tensors(reference.state_dict()))
    assert model.config.max_position_embeddings == 2048
    assert model.config.hidden_act == "silu"
    assert model.config.is_encoder_decoder is False


def test_an_unknown_attribute_of_the_configuration_is_an_attribute_error() -> None:
    config = ours(reference_decoder("llama", torch.float32)).config
    assert getattr(config, "no_such_value", 7) == 7
    assert config["vocab_size"] == config.vocab_size == 97
