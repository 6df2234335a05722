"""Panels of floats that are multiplied two at once give the bits that each gives by itself."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from everystep.executors.native import NativeExecutor, read_rows
from everystep.executors.torch_executor import TorchExecutor
from everystep.models import Model, build_model
from everystep.models.loader import HeldWeights
from everystep.types import Verb
from tests.executors.members import members
from tests.executors.works import one_feed

pytestmark = pytest.mark.native

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@cache
def model_of(dtype: torch.dtype) -> Model:
    """Its linear maps have 51, 17 and 17 panels: two members take two at once, and one is left.
    Queries, keys and values have biases."""
    config = Qwen2Config(
        vocab_size=48,
        hidden_size=272,
        num_attention_heads=17,
        num_key_value_heads=17,
        intermediate_size=304,
        num_hidden_layers=2,
    )
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.randn(weight.shape, generator=generator) * (0.1 if weight.dim() > 1 else 1.0)
        for name, weight in Qwen2ForCausalLM(config).state_dict().items()
    }
    source = HeldWeights(weights)
    return build_model(config.to_dict(), source, dtype=dtype, in_panels=lambda spec: read_rows)


def read(ids: list[int], dtype: torch.dtype) -> Tensor:
    """(R, V) the logits after every id, read at once."""
    work = one_feed(ids, verbs=(Verb("allocate", 0),))
    return NativeExecutor(model_of(dtype)).run(work).logits


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [8, 11, 12, 21, 45])
def test_no_bit_depends_on_the_panel_beside(dtype: torch.dtype, rows: int) -> None:
    ids = np.random.default_rng(rows).integers(0, 48, rows).tolist()
    whole = read(ids, dtype)
    executor = NativeExecutor(model_of(dtype))
    for start, token in enumerate(ids):
        verbs = () if start else (Verb("allocate", 0),)
        logits = executor.run(one_feed([token], start=start, verbs=verbs)).logits
        assert torch.equal(logits[0], whole[start])
    judged = TorchExecutor(model_of(dtype)).run(one_feed(ids, verbs=(Verb("allocate", 0),))).logits
    assert torch.allclose(whole, judged, atol=1e-4 * float(judged.abs().max()))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_any_number_of_members_gives_the_same_bits(dtype: torch.dtype, count: int) -> None:
    ids = np.random.default_rng(4).integers(0, 48, 300).tolist()  # more than are read at once
    with members(2):
        wanted = read(ids, dtype)
    with members(count):
        assert torch.equal(read(ids, dtype), wanted)
