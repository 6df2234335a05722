"""Configurations and weights that contradict themselves or each other are refused with reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everystep.errors import EverystepError, FormatError, RequestError, UnsupportedError
from everystep.models import build_model
from everystep.types import Prompt
from tests.models.tiny import SIZES, T5_SIZES, Tensors, ids, ours, reference_decoder, reference_t5

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}
WRONG_VALUES: list[tuple[dict[str, Any], type[EverystepError], tuple[str, ...]]] = [
    ({"model_type": "lama"}, UnsupportedError, ("model_type", "'lama'", "'llama'")),
    ({"model_type": None}, UnsupportedError, ("model_type",)),
    ({"hidden_act": "softmax"}, UnsupportedError, ("hidden_act", "silu", "'softmax'")),
    ({"num_key_value_heads": 4}, FormatError, ("num_key_value_heads", "divisor of 6", "4")),
    (
        {"num_attention_heads": 7, "num_key_value_heads": None},
        FormatError,
        ("num_attention_heads", "48", "7"),
    ),
    ({"hidden_size": "48"}, FormatError, ("hidden_size", "whole number", "'48'")),
    ({"hidden_size": 0}, FormatError, ("hidden_size", "at least 1")),
    ({"num_hidden_layers": True}, FormatError, ("num_hidden_layers", "True")),
    ({"num_hidden_layers": 10**8}, FormatError, ("num_hidden_layers", "at most 10000", "10")),
    ({"num_hidden_layers": 2**63}, FormatError, ("num_hidden_layers", "at most 10000", "9223")),
    ({"rms_norm_eps": 10**400}, FormatError, ("rms_norm_eps", "positive number", "1000")),
    ({"rope_theta": 10**400}, FormatError, ("rope_theta", "positive number", "1000")),
    ({"rms_norm_eps": -1.0}, FormatError, ("rms_norm_eps", "positive", "-1.0")),
    ({"attention_bias": "yes"}, FormatError, ("attention_bias", "true or false")),
    ({"dtype": "float8"}, FormatError, ("dtype", "bfloat16", "'float8'")),
    ({"rope_scaling": [2.0]}, FormatError, ("rope_parameters", "an object")),
    ({"rope_scaling": {"rope_type": "spiral"}}, UnsupportedError, ("rope_type", "'spiral'")),
    ({"rope_scaling": {"rope_type": "linear"}}, FormatError, ("factor", "missing")),
    ({"rope_scaling": LLAMA3}, FormatError, ("low_freq_factor", "less than", "4.0")),
    ({"rope_scaling": LONGROPE}, FormatError, ("short_factor", "4 positive numbers")),
    (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "bela_fast": 3.0}},
        UnsupportedError,
        ("'linear'", "bela_fast", "Remove"),
    ),
    ({"partial_rotary_factor": 1.5}, FormatError, ("partial_rotary_factor", "at most 1")),
    ({"head_dim": 7}, FormatError, ("head_dim", "even", "7")),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]},
        FormatError,
        ("layer_types", "3 times"),
    ),
]
EMPTY = Tensors({})


@pytest.mark.parametrize(("values", "kind", "parts"), WRONG_VALUES, ids=lambda one: str(one)[:50])
def test_wrong_values(values: Any, kind: type[EverystepError], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        build_model({"model_type": "llama", **SIZES, **values}, EMPTY)
    for part in parts:
        assert part in str(caught.value)


def test_a_wrong_mlp_of_t5() -> None:
    with pytest.raises(UnsupportedError, match=r"feed_forward_proj.*'twice-gated-relu'"):
        build_model(
            {"model_type": "t5", **T5_SIZES, "feed_forward_proj": "twice-gated-relu"}, EMPTY
        )


def weights() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    reference = reference_decoder("llama", torch.float32)
    return reference.config.to_dict(), dict(reference.state_dict())


def test_missing_weights_are_named() -> None:
    config, tensors = weights()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(FormatError, match=r"missing.*layers\.1\.mlp\.up_proj\.weight"):
        build_model(config, Tensors(tensors))


def test_weights_without_a_place_are_named() -> None:
    config, tensors = weights()
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)
    with pytest.raises(FormatError, match=r"no place for.*q_proj\.bias"):
        build_model(config, Tensors(tensors))


def test_a_wrong_shape_is_named_with_both_shapes() -> None:
    config, tensors = weights()
    tensors["model.norm.weight"] = torch.ones(47)
    with pytest.raises(FormatError, match=r"model\.norm\.weight.*\(48,\).*\(47,\)"):
        build_model(config, Tensors(tensors))


def test_nothing_is_read_before_names_and_shapes_are_right() -> None:
    class Untouchable(Tensors):
        def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
            raise AssertionError(f"{name} was read")

    config, tensors = weights()
    tensors["model.norm.weight"] = torch.ones(47)
    with pytest.raises(FormatError):
        build_model(config, Untouchable(tensors))


def test_leftovers_of_older_checkpoints_are_let_through() -> None:
    config, tensors = weights()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    build_model(config, Tensors(tensors))


def test_a_type_that_no_model_runs_in() -> None:
    config, tensors = weights()
    with pytest.raises(UnsupportedError, match="int8"):
        build_model(config, Tensors(tensors), dtype=torch.int8)


def test_wrong_forwards() -> None:
    decoder, pair = (
        ours(reference_decoder("llama", torch.float32)),
        ours(reference_t5(torch.float32)),
    )
    read = ids(2, 5)
    for call in (
        lambda: decoder.forward(None),
        lambda: decoder.forward(read, None, None, torch.zeros(2, 5, 48)),
        lambda: decoder.forward(read, torch.ones(2, 4)),
        lambda: decoder.forward(read, decoder_input_ids=read),
        lambda: pair.forward(read),
        lambda: pair.forward(read, None, torch.arange(5), decoder_input_ids=read),
        lambda: decoder.encode(Prompt(ids=read[0].numpy())),
        lambda: pair.encode(Prompt()),
    ):
        with pytest.raises(RequestError):
            call()
