"""A model in the words of a GGUF file is what the format's converters would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.errors import UnsupportedError
from everystep.files.gguf import read_gguf
from everystep.files.gguf_writer import BLOCKS, GgufEntry
from everystep.files.gguf_writer import write_gguf as write
from everystep.models import Model, build_model
from everystep.models.gguf import build_gguf_model
from everystep.models.gguf_export import (
    gguf_metadata,
    gguf_shapes,
    gguf_tensors,
    require_same_model,
)
from everystep.models.gguf_mixes import block_of
from everystep.models.importance import column_squares
from everystep.models.loader import HeldWeights
from tests.models.test_gguf import FAMILIES, LLAMA3, LONG, converted, metadata
from tests.models.tiny import farthest, ids, reference_decoder, with_norms

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
ROPES = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("qwen2", {"rope_parameters": LINEAR}),
    "yarn": ("qwen2", {"rope_parameters": YARN}),
    "longrope": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 16},
    ),
    "biases": ("llama", {"attention_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
}
CASES = {name: (kind, config) for name, (kind, _, config, _) in FAMILIES.items()} | ROPES


def built(reference: Any) -> Model:
    return build_model(reference.config.to_dict(), HeldWeights(reference.state_dict()))


def written(model: Model, path: Path) -> Path:
    """Every weight as float32."""
    tensors = [(name, values.float().contiguous()) for _, name, values in gguf_tensors(model)]
    entries = [GgufEntry(name, tuple(one.shape), BLOCKS["F32"]) for name, one in tensors]
    with path.open("wb") as file:
        write(
            file, gguf_metadata(model, "tiny"), entries, (v.view(torch.uint8) for _, v in tensors)
        )
    return path


@pytest.mark.parametrize("name", CASES)
def test_it_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    kind, config = CASES[name]
    model = built(with_norms(reference_decoder(kind, torch.float32, **config)))
    shapes = [(name, tuple(one.shape)) for _, name, one in gguf_tensors(model)]
    assert list(gguf_shapes(model)) == shapes
    file = read_gguf(written(model, tmp_path / "x.gguf"))
    require_same_model(model, file)
    again = build_gguf_model(file)
    read = ids(2, 40)
    assert farthest(again.forward(read), model.forward(read)) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_what_a_converter_writes(name: str) -> None:
    kind, architecture, config, keys = FAMILIES[name]
    reference = with_norms(reference_decoder(kind, torch.float32, **config))
    model = built(reference)
    found = gguf_metadata(model, "tiny")
    wanted = metadata(architecture, **keys)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    tensors = {name: values for _, name, values in gguf_tensors(model)}
    expected = converted(reference, kind)
    assert tensors.keys() == expected.keys()
    for name, (_, values) in expected.items():
        torch.testing.assert_close(tensors[name], values, rtol=1e-6, atol=1e-7)


def test_other_families_are_refused() -> None:
    model = built(reference_decoder("gpt2", torch.float32))
    with pytest.raises(UnsupportedError, match="not written as GGUF"):
        gguf_metadata(model, "x")


@pytest.mark.parametrize(
    ("kind", "config", "part"),
    [
        ("llama", {"mlp_bias": True}, "mlp"),
        ("mistral", {"sliding_window": 7}, "sliding_window"),
        ("llama", {"rope_parameters": DYNAMIC}, "rotary"),
        ("qwen2", {"rope_parameters": {**YARN, "attention_factor": 3.0}}, "rotary"),
        ("llama", {"hidden_act": "gelu"}, "mlp"),
        ("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": None}, None),
    ],
    ids=str,
)
def test_what_a_file_cannot_say_is_refused(
    tmp_path: Path, kind: str, config: Any, part: str | None
) -> None:
    """Or, in the last case, is said."""
    model = built(reference_decoder(kind, torch.float32, **config))
    file = read_gguf(written(model, tmp_path / "x.gguf"))
    if part is None:
        require_same_model(model, file)
        return
    with pytest.raises(UnsupportedError, match=part):
        require_same_model(model, file)


@pytest.mark.parametrize(
    ("format", "name", "columns", "kind"),
    [
        ("q4_k_m", "output.weight", 512, "Q6_K"),
        ("q4_k_m", "token_embd.weight", 512, "Q4_K"),
        ("q4_k_m", "blk.0.attn_v.weight", 512, "Q6_K"),
        ("q4_k_m", "blk.3.attn_v.weight", 512, "Q4_K"),
        ("q4_k_m", "blk.4.ffn_down.weight", 512, "Q6_K"),
        ("q4_k_m", "blk.15.ffn_down.weight", 512, "Q6_K"),
        ("q4_k_m", "blk.3.attn_qkv.weight", 512, "Q5_K"),
        ("q4_k_m", "blk.3.attn_q.weight", 576, "Q5_0"),
        ("q5_k_m", "blk.3.attn_q.weight", 576, "Q8_0"),
        ("q6_k", "blk.3.attn_q.weight", 576, "Q8_0"),
        ("q8_0", "blk.3.attn_q.weight", 576, "Q8_0"),
        ("q4_k_m", "blk.3.attn_q.weight", 72, "F16"),
    ],
)
def test_which_blocks_a_tensor_gets(format: Any, name: str, columns: int, kind: str) -> None:
    assert block_of(format, name, (64, columns), 16, tied=False).name == kind
    if name == "token_embd.weight":
        assert block_of(format, name, (64, columns), 16, tied=True).name == "Q6_K"
    assert block_of(format, name, (columns,), 16, tied=False).name == "F32"


def test_what_columns_are_multiplied_by() -> None:
    """Of every matrix, projections of one input alike, as a hook of torch sees it."""
    reference = reference_decoder("llama", torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear):
            key = f"{name}.weight"
            module.register_forward_pre_hook(
                lambda _, x, key=key: seen.setdefault(key, []).append(x[0].flatten(0, -2))
            )
    read = ids(1, 30)[0]
    with torch.no_grad():
        for part in read.split(12):
            reference(part[None])
    found = column_squares(built(reference), read, 12)
    assert found.keys() == seen.keys()
    for name, parts in seen.items():
        wanted = torch.cat(parts).square().mean(0)
        torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-6)


def test_a_tied_head_weighs_the_table() -> None:
    model = built(reference_decoder("llama", torch.float32, tie_word_embeddings=True))
    assert "model.embed_tokens.weight" in column_squares(model, ids(1, 8)[0], 8)
