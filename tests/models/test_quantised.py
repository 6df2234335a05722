"""Models with quantised weights: taken from GGUF bit for bit, or made from floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from everystep.errors import RequestError, UnsupportedError
from everystep.files.gguf import GgufFile, read_gguf
from everystep.models import (
    Model,
    build_gguf_model,
    build_model,
    convert_model,
    named_weights,
    stored_weights,
)
from everystep.nn.quantized import QuantizedWeight
from tests.files.gguf_writer import write_gguf
from tests.judges.numpy_executor import NumpyExecutor
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import (
    Tensors,
    farthest,
    ids,
    reference_decoder,
    reference_pair,
    reference_t5,
)

# Weights drawn narrowly: what rounding does to a wild model says nothing about rounding.
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "initializer_range": 0.08,
}
KEYS = {"embedding_length": 96, "feed_forward_length": 160, "rope.dimension_count": 16}
# What the real files look like: a Q4_1 file holds its table in Q8_0.
FILES: dict[str, dict[str, str]] = {
    "Q8_0": {"": "Q8_0"},
    "Q4_0": {"": "Q4_0", "token_embd": "Q8_0"},
    "Q4_1": {"": "Q4_1", "token_embd": "Q8_0"},
    "a mixture": {"": "Q4_0", "attn_v": "Q8_0", "ffn_up": "F16", "output.": "F16"},
}


def written(path: Path, kind: str, formats: dict[str, str], **config: Any) -> GgufFile:
    """A file whose matrices have these formats, by parts of their names."""
    reference = reference_decoder(kind, torch.float32, **SIZES, **config)
    tensors: dict[str, tuple[str, Tensor]] = {}
    for name, (_, values) in converted(reference, kind).items():
        fitting = [form for part, form in formats.items() if part in name]
        tensors[name] = (fitting[-1] if values.dim() == 2 else "F32", values)
    keys = metadata(kind, **KEYS)
    return read_gguf(write_gguf(path / "model.gguf", keys, tensors))


@pytest.mark.parametrize("formats", FILES.values(), ids=FILES)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_are_kept_bit_for_bit(tmp_path, kind, formats, tied) -> None:
    file = written(tmp_path, kind, formats, tie_word_embeddings=tied)
    kept = build_gguf_model(file)
    floats = dict(named_weights(build_gguf_model(file, dtype=torch.float32)))
    stored = dict(stored_weights(kept))
    assert stored.keys() == floats.keys()
    for name, weight in stored.items():
        values = weight if isinstance(weight, Tensor) else weight.dequantize()
        assert torch.equal(values, floats[name]), name
    quantised = [one for one in stored.values() if isinstance(one, QuantizedWeight)]
    assert {one.format for one in quantised} <= {"q8_0", "q4_0", "q4_1"}
    assert len(quantised) > 3 * 5


@pytest.mark.parametrize("formats", FILES.values(), ids=FILES)
def test_only_activations_distinguish_it_from_its_floats(tmp_path, formats) -> None:
    file = written(tmp_path, "llama", formats)
    kept = build_gguf_model(file)
    exact = convert_model(kept, exact_activations=True)
    floats = build_gguf_model(file, dtype=torch.float32)
    read = ids(2, 20)
    expected = floats.forward(read)
    assert farthest(exact.forward(read), expected) < 1e-5
    assert 1e-3 < rms(kept.forward(read), expected) < 2e-2


def rms(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, as a share of that of the expected numbers."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def test_a_tied_head_reads_the_table(tmp_path) -> None:
    network: Any = build_gguf_model(
        written(tmp_path, "llama", FILES["Q4_1"], tie_word_embeddings=True)
    ).network
    assert network.head.weight is network.table
    assert network.table.format == "q8_0" and network.layers[0].qkv.weight.format == "q4_1"


def test_weights_own_their_memory(tmp_path) -> None:
    file = written(tmp_path, "qwen2", {"": "Q8_0"})
    model, read = build_gguf_model(file), ids(1, 5)
    before = model.forward(read)
    file.data.zero_()
    assert torch.equal(model.forward(read), before)


def test_a_type_makes_floats_of_the_blocks(tmp_path) -> None:
    file = written(tmp_path, "llama", FILES["Q4_0"])
    for options in ({"dtype": torch.bfloat16}, {"quantize": None}):
        model = build_gguf_model(file, **options)
        assert model.dtype == options.get("dtype", torch.float32)
        assert all(isinstance(weight, Tensor) for _, weight in stored_weights(model))


def test_what_is_rounded_is_not_rounded_again(tmp_path) -> None:
    file = written(tmp_path, "llama", FILES["Q4_1"])
    with pytest.raises(RequestError, match=r"second error.*Q4_1, Q8_0"):
        build_gguf_model(file, quantize="int8")
    plain = written(tmp_path, "llama", {"": "F16"})
    assert formats_of(build_gguf_model(plain, quantize="int8")) == {"int8"}


def formats_of(model: Model) -> set[str]:
    """The formats of all quantised weights."""
    weights = [one for _, one in stored_weights(model)]
    return {one.format for one in weights if isinstance(one, QuantizedWeight)}


INNER = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.1}
TABLES = ("relative_attention_bias", "embed_positions", "final_logits_bias")
"""What is added as it is."""


def references() -> list[PreTrainedModel]:
    every: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
    return [
        reference_decoder("llama", torch.float32, **SIZES, **every),
        reference_decoder("qwen2", torch.float32, **SIZES, tie_word_embeddings=True),
        reference_t5(torch.float32, feed_forward_proj="gated-gelu", d_kv=16),
        reference_pair("bart", torch.float32, **INNER),
        reference_pair("marian", torch.float32, **INNER, share_encoder_decoder_embeddings=False),
    ]


def made(reference: PreTrainedModel, **options: Any) -> Model:
    return build_model(reference.config.to_dict(), Tensors(reference.state_dict()), **options)


@pytest.mark.parametrize(("format", "bound"), [("int8", 0.05), ("int4", 0.4)])
@pytest.mark.parametrize("index", range(5))
def test_every_family_is_rounded(index, format, bound) -> None:
    reference = references()[index]
    model = made(reference, quantize=format)
    assert formats_of(model) == {format} and model.dtype == torch.float32
    floats = dict(named_weights(made(reference)))
    for name, weight in stored_weights(model):
        if isinstance(weight, Tensor):
            assert weight.dim() == 1 or any(one in name for one in TABLES), name
        else:
            assert rms(weight.dequantize(), floats[name]) < bound / 3
    asked: dict[str, Any] = {"decoder_input_ids": ids(2, 4)} if index > 1 else {}
    read = ids(2, 12)
    assert rms(model.forward(read, **asked), made(reference).forward(read, **asked)) < bound


def test_parts_of_a_fused_weight_come_out_apart() -> None:
    model = made(references()[0], quantize="int4")
    fused = model.network.layers[0].qkv.weight
    stored = dict(stored_weights(model))
    parts = [stored[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    assert torch.equal(QuantizedWeight.cat(parts).codes, fused.codes)
    assert parts[0].codes.data_ptr() == fused.codes.data_ptr()


def test_a_quantised_model_moves_as_it_is_and_widens_when_asked() -> None:
    model, read = made(references()[1], quantize="int8"), ids(1, 9)
    moved = convert_model(model, device="cpu")
    assert formats_of(moved) == {"int8"}
    assert torch.equal(moved.forward(read), model.forward(read))
    wide = convert_model(model, dtype=torch.float64)
    assert formats_of(wide) == set() and wide.dtype == torch.float64
    exact = convert_model(model, exact_activations=True)
    assert farthest(exact.forward(read), wide.forward(read)) < 1e-5


def test_the_numpy_executor_reads_the_values_of_quantised_weights() -> None:
    model = made(references()[0], quantize="int8")
    weights = NumpyExecutor(model)._weights
    value = dict(named_weights(model))["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(torch.from_numpy(weights["layers.1.down.weight"]), value.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_quantised_weights_have_no_other_type_beside_them(dtype) -> None:
    with pytest.raises(RequestError, match="float32"):
        made(references()[0], quantize="int8", dtype=dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["mlp.up_proj.weight", "input_layernorm.weight"])
@pytest.mark.parametrize("rounding", ["int8", "int4"])
def test_what_is_no_number_is_not_rounded(rounding: Any, part: str, value: float) -> None:
    reference = reference_decoder("llama", torch.float32, **SIZES)
    with torch.no_grad():
        reference.state_dict()[f"model.layers.1.{part}"].view(-1)[5] = value
    with pytest.raises(UnsupportedError, match=r"no number|nan or infinite"):
        made(reference, quantize=rounding)


def test_a_file_whose_scales_are_no_numbers_is_refused(tmp_path) -> None:
    file = written(tmp_path, "llama", {"": "Q8_0"})
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    place = file.tensors["blk.0.ffn_up.weight"].offset
    data[place : place + 2] = b"\x00\x7e"
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UnsupportedError, match=r"up_proj.weight holds nan"):
        build_gguf_model(read_gguf(tmp_path / "model.gguf"))


def test_groups_of_four_bits_must_be_whole() -> None:
    with pytest.raises(UnsupportedError, match="multiple of 32; got 48"):
        made(reference_decoder("llama", torch.float32), quantize="int4")


@pytest.mark.model
def test_the_default_model_keeps_its_blocks(model_path: Path) -> None:
    file = read_gguf(model_path)
    stored = dict(stored_weights(build_gguf_model(file)))
    for name, values in named_weights(build_gguf_model(file, dtype=torch.float32)):
        weight = stored[name]
        kept = weight if isinstance(weight, Tensor) else weight.dequantize()
        assert torch.equal(kept, values), name
    assert stored["model.embed_tokens.weight"].format == "q8_0"
