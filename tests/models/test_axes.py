"""Positions of three axes turn queries and keys as in transformers' text models, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from everystep.engine import Engine, Lockstep
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model
from everystep.models.config import ModelConfig
from everystep.models.decoder import assemble_decoder
from everystep.models.loader import WeightLoader
from everystep.models.parameters import decoder_parameters
from everystep.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from everystep.nn.rotary import UNSCALED, Rope, section_axes
from everystep.strategies import Greedy
from everystep.types import Prompt
from tests.executors.requests import request
from tests.models.tiny import Tensors, farthest, ids

SECTIONS = (6, 5, 5)
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rope_theta": 1000.0,
}
PLACES = torch.tensor(
    [
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7],
        [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7],
        [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7],
    ]
)


def reference(kind: str) -> PreTrainedModel:
    """A text model of transformers with random weights."""
    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": list(SECTIONS)}
    if kind == "qwen3_vl":
        rope["mrope_interleaved"] = True
        config = Qwen3VLTextConfig(**SIZES, head_dim=32, rope_parameters=rope)
        return Qwen3VLTextModel(config).double().eval()
    return Qwen2VLTextModel(Qwen2VLTextConfig(**SIZES, rope_parameters=rope)).double().eval()


def ours(kind: str, text: PreTrainedModel, head: Tensor) -> Model:
    """Our decoder with the weights of transformers', and a head."""
    third = kind == "qwen3_vl"
    rope = Rope(32, 1000.0, UNSCALED, section_axes(SECTIONS, interleaved=third))
    spec = DecoderSpec(
        vocab_size=40,
        width=64,
        norm=NormSpec("rms", text.config.rms_norm_eps),
        attention=AttentionSpec(
            2, 1, 32, 32**-0.5, qkv_bias=not third, qk_norm="heads" if third else None
        ),
        mlp=MlpSpec(128, "silu"),
        layers=(LayerSpec(rope),) * 2,
    )
    weights = {f"model.{name}": weight for name, weight in text.state_dict().items()}
    weights["lm_head.weight"] = head
    parameters = {one.key: one for one in decoder_parameters(spec)}
    loader = WeightLoader(parameters, Tensors(weights), torch.float64, torch.device("cpu"))
    return Model(ModelConfig({"model_type": "llama"}), spec, assemble_decoder(spec, loader))


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_a_forward_is_the_references(kind: str) -> None:
    text, head = reference(kind), torch.randn(40, 64, dtype=torch.float64)
    model, tokens = ours(kind, text, head), ids(2, 11, 40)
    places = torch.stack([PLACES, torch.arange(11).expand(3, -1)], dim=1)
    with torch.inference_mode():
        expected = text(input_ids=tokens, position_ids=places).last_hidden_state @ head.T
        found = model.forward(tokens, position_ids=places)
    assert farthest(found, expected) < 1e-10


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_generated_tokens_stand_where_the_reference_puts_them(kind: str) -> None:
    text, head = reference(kind), torch.randn(40, 64, dtype=torch.float64)
    prompt = ids(1, 11, 40)[0]
    engine = Engine(TorchExecutor(ours(kind, text, head)), Lockstep(4))
    own = request("greedy", Greedy(), Prompt(prompt.numpy(), positions=PLACES))
    group = engine.submit(replace(own, stops=own.stops[1:]))
    while engine.pending:
        engine.step()
    (found,) = group.done
    tokens, places = prompt[None], PLACES[:, None]
    for token in found.tokens.tolist():
        with torch.inference_mode():
            hidden = text(input_ids=tokens, position_ids=places, use_cache=False).last_hidden_state
        assert int((hidden[0, -1] @ head.T).argmax()) == token
        # As `get_rope_index` has it: one more than the greatest so far.
        following = places.max() + 1
        tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
        places = torch.cat([places, following.expand(3, 1, 1)], dim=2)
