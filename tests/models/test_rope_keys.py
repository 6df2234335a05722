"""Every key of rope parameters does what it does in transformers: something, or nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters
from transformers.models.stablelm.modeling_stablelm import StableLmRotaryEmbedding

from everystep.errors import UnsupportedError
from everystep.models.config import Fields
from everystep.models.rope_config import read_rope

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rope_theta": 10000.0}
TRAINED = "original_max_position_embeddings"
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, TRAINED: 4096},
    "longrope": {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, TRAINED: 32},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, TRAINED: 32},
}
# Telling values; a length that is longer than the one that was trained.
VALUES: dict[str, Any] = {
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "factor": 8.0,
    TRAINED: 16,
    "attention_factor": 1.5,
    "beta_fast": 3.0,
    "beta_slow": 0.1,
    "short_factor": [1.5] * 8,
    "long_factor": [3.0] * 8,
    "low_freq_factor": 2.0,
    "high_freq_factor": 8.0,
    "mscale": 2.0,
    "mscale_all_dim": 3.0,
    "truncate": False,
    "attn_factor": 0.8,
    "finetuned": True,
    "alpha": 1000.0,
    "extrapolation_factor": 2.0,
}
# Two keys that yarn reads together.
PAIRED = {"mscale": "mscale_all_dim", "mscale_all_dim": "mscale"}


def test_every_declared_key_has_a_telling_value() -> None:
    assert RopeParameters.__annotations__.keys() - VALUES.keys() == {"rope_type", "mrope_section"}


def ours(values: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    fields = Fields({**SIZES, "max_position_embeddings": 64, "rope_parameters": values})
    rope = read_rope(fields, 16)
    wanted = torch.tensor([length]) if rope.scaling.by_length else None
    found = rope.scaling.frequencies(rope.dim, rope.theta, wanted)
    return found.reshape(-1), rope.scaling.attention_factor


def theirs(values: dict[str, Any], length: int) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(**SIZES, max_position_embeddings=64, rope_parameters=dict(values))
    kind = values["rope_type"]
    if kind == "default":
        return StableLmRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, None, seq_len=length)


def same(one: tuple[torch.Tensor, float], other: tuple[torch.Tensor, float]) -> bool:
    shapes = one[0].shape == other[0].shape
    return shapes and torch.allclose(one[0], other[0], rtol=1e-5) and abs(one[1] - other[1]) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_key_does_what_it_does_in_transformers(kind: str) -> None:
    for key, value in VALUES.items():
        plain = {"rope_type": kind, **KINDS[kind]}
        if key in PAIRED:
            plain[PAIRED[key]] = 1.0
        given = {**plain, key: value}
        if key == "partial_rotary_factor" and kind == "longrope":
            given |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        changes = False
        for length in (8, 100):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = ours(given, length)
            assert same(found, theirs(given, length)), (key, length)
            changes |= not same(found, ours(plain, length))
        named = {name for one in caught for name in str(one.message).split(": ")[-1].split(", ")}
        assert changes == (key not in named), key


def test_a_real_file_is_read_with_a_warning() -> None:
    values = {"rope_type": "yarn", "factor": 4.0, TRAINED: 32, "attn_factor": 0.878}
    with pytest.warns(UserWarning, match=r"'yarn'.*change nothing.*: attn_factor$"):
        found = ours(values, 8)
    del values["attn_factor"]
    assert same(found, ours(values, 8))
    assert Qwen3Config(rope_parameters=values).rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("key", ["mrope_section", "atn_factor", "factors"])
def test_a_key_that_nothing_knows_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedError, match=key):
        ours({"rope_type": "default", key: 2.0}, 8)
