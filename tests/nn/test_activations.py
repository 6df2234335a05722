"""Activations are those of transformers under its names, and one's own under other names."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2CLS, ACT2FN

import everystep as es
from everystep.errors import RequestError, UnsupportedError
from everystep.executors.native.program import spec_obstacles
from everystep.models.load import build_model
from everystep.nn.activations import ACTIVATIONS, register_activation
from tests.models.tiny import farthest, ids, ours, reference_decoder, reference_t5

WITH_WEIGHTS = {"prelu", "xielu"}


class Sine(torch.nn.Module):
    """An activation that transformers does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_every_name_without_weights_is_known() -> None:
    assert set(ACT2CLS) - WITH_WEIGHTS <= set(ACTIVATIONS)


@pytest.mark.parametrize("name", sorted(set(ACT2CLS) - WITH_WEIGHTS))
def test_an_activation_is_that_of_transformers(name: str) -> None:
    x = torch.cat((torch.randn(500, dtype=torch.float64) * 4, torch.tensor([0.0, 40.0, -40.0])))
    assert torch.allclose(ACTIVATIONS[name](x), ACT2FN[name](x), rtol=0, atol=1e-6)
    narrow = x.to(torch.bfloat16)
    assert ACTIVATIONS[name](narrow).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["relu2", "mish", "tanh", "laplace", "linear", "gelu_10"])
def test_a_model_with_it_equals_that_of_transformers(name: str) -> None:
    reference = reference_decoder("llama", torch.float64, hidden_act=name)
    read = ids(2, 9)
    with torch.no_grad():
        expected = reference(read).logits
    model = ours(reference)
    assert farthest(model.forward(read), expected) < 1e-10
    assert any(name in one for one in spec_obstacles(model.spec)), "there is no kernel for it"


@pytest.mark.parametrize("name", ["gated-mish", "relu2"])
def test_encoders_have_them_too(name: str) -> None:
    reference = reference_t5(torch.float64, feed_forward_proj=name)
    read = ids(2, 9)
    with torch.no_grad():
        expected = reference(input_ids=read, decoder_input_ids=read).logits
    assert farthest(ours(reference).forward(read, decoder_input_ids=read), expected) < 1e-10


@pytest.mark.parametrize("name", sorted(WITH_WEIGHTS))
def test_an_activation_with_weights_of_its_own_is_refused(name: str) -> None:
    config = reference_decoder("llama", torch.float32).config.to_dict()
    with pytest.raises(UnsupportedError, match="hidden_act is not supported"):
        build_model({**config, "hidden_act": name}, {})  # type: ignore[arg-type]


def test_one_of_ones_own_is_registered() -> None:
    reference = reference_decoder("llama", torch.float64, hidden_act="tanh")
    read = ids(2, 9)
    for layer in reference.model.layers:
        layer.mlp.act_fn = Sine()
    with torch.no_grad():
        expected = reference(read).logits
    reference.config.hidden_act = "sine of a test"
    with pytest.raises(
        UnsupportedError, match=r"hidden_act is not supported.*got 'sine of a test'"
    ):
        ours(reference)
    es.register_activation("sine of a test", torch.sin)
    assert farthest(ours(reference).forward(read), expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "function", "told"),
    [
        ("silu", torch.sin, "under this name"),
        ("", torch.sin, "under this name"),
        (3, torch.sin, "under this name"),
        ("wave", 3, "no activation"),
        ("wave", torch.sum, "no activation"),
        ("wave", lambda x: x.double(), "no activation"),
        ("wave", lambda x: None, "no activation"),
    ],
)
def test_what_is_no_activation_is_refused(name: str, function: object, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        register_activation(name, function)  # type: ignore[arg-type]
    assert "wave" not in ACTIVATIONS
