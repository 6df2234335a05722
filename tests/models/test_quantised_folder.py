"""Folders with quantised weights: back bit for bit, whole or absent, broken ones with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils.quantization_config import QuantizationMethod

import everystep as es
from everystep.api.quantize import quantize as write_quantized
from everystep.errors import EverystepError, FileError, FormatError, RequestError, UnsupportedError
from everystep.models import convert_model, stored_weights
from everystep.models.quantised_folder import folder_format
from everystep.nn.quantized import QuantizedWeight
from everystep.nn.rounding import quantize
from tests.cli.tiny_model import CONFIG, write_tiny_model
from tests.models.tiny import reference_decoder, with_norms

# Their tiny tokenizers have the class of a family, and not its rules.
pytestmark = pytest.mark.filterwarnings("ignore:.*transformers replaces its rules")

WIDE = {"hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny model whose inputs are whole blocks."""
    folder = write_tiny_model(tmp_path / "source")
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    wide = {
        name: torch.randn(
            [2 * size if size in (8, 16, 32) else size for size in one.shape], generator=generator
        )
        for name, one in tensors.items()
    }
    save_file(wide, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **WIDE}))
    return folder


def weights(model: Any) -> dict[str, Any]:
    return dict(stored_weights(model.core))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_folder_comes_back_bit_for_bit(source: Path, tmp_path: Path, format: Any) -> None:
    made, _ = es.load(source, quantize=format)
    target = write_quantized(source, tmp_path / "target", format)
    found, tokenizer = es.load(target)
    assert weights(found).keys() == weights(made).keys()
    for name, one in weights(made).items():
        other = weights(found)[name]
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
            continue
        assert (other.format, other.mins is None) == (format, one.mins is None)
        assert torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)
    prompt = tokenizer("hello", return_tensors="pt")
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(found.generate(**prompt, **options), made.generate(**prompt, **options))
    assert es.load_model(target, quantize=format).generation_config.eos_token_id == 256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox"])
def test_layouts_of_checkpoints_come_back(kind: str, tmp_path: Path, format: Any) -> None:
    """Where projections lie transposed, and where queries, keys and values take turns."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "n_inner": 64, "intermediate_size": 64}
    config = {**sizes, "vocab_size": CONFIG["vocab_size"]}
    reference = with_norms(reference_decoder(kind, torch.float32, **config))
    reference.save_pretrained(write_tiny_model(tmp_path / "source"))
    made = es.load_model(tmp_path / "source", quantize=format)
    target = write_quantized(tmp_path / "source", tmp_path / "target", format)
    found, read = es.load_model(target), torch.arange(9)[None]
    assert torch.equal(found.core.forward(read), made.core.forward(read))
    floats = es.load_model(target, dtype=torch.float32)
    exact = {name: one.shape for name, one in reference.state_dict().items()}
    exact["embed_out.weight"] = exact["lm_head.weight"]
    assert all(exact[name] == one.shape for name, one in floats.state_dict().items())
    wide = convert_model(made.core, dtype=torch.float32).forward(read)
    assert torch.equal(floats.core.forward(read), wide)
    # Each output is rounded by itself.
    name = {"gpt2": "transformer.h.0.attn.c_attn", "gpt_neox": "gpt_neox.layers.0.attention.dense"}
    weight = reference.state_dict()[f"{name[kind]}.weight"]
    rounded = quantize(weight.T if kind == "gpt2" else weight, format).dequantize()
    own = floats.state_dict()[f"{name[kind]}.weight"]
    assert torch.equal(own, rounded.T if kind == "gpt2" else rounded)


def test_a_type_makes_floats_of_the_codes(source: Path, tmp_path: Path) -> None:
    target = write_quantized(source, tmp_path / "target", "int8")
    codes = weights(es.load_model(target))
    for options in ({"dtype": torch.float64}, {"quantize": None}):
        floats = weights(es.load_model(target, **options))
        for name, one in codes.items():
            if isinstance(one, QuantizedWeight):
                assert torch.equal(floats[name].float(), one.dequantize())


def test_what_is_there_stays(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "note").write_text("mine")
    with pytest.raises(FileError, match="is there already"):
        write_quantized(source, target, "int8")
    assert [path.name for path in target.iterdir()] == ["note"]


def test_nothing_is_left_of_a_folder_that_failed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("everystep.api.quantize.write_atomic", full)
    with pytest.raises(OSError, match="No space"):
        write_quantized(source, tmp_path / "target", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_rounding_again_is_refused(source: Path, tmp_path: Path) -> None:
    target = write_quantized(source, tmp_path / "target", "int8")
    for call in (
        lambda: es.load(target, quantize="int4"),
        lambda: write_quantized(target, tmp_path / "again", "int4"),
    ):
        with pytest.raises(RequestError, match="not rounded again"):
            call()
    with pytest.raises(RequestError, match="no such format"):
        write_quantized(source, tmp_path / "again", "int2")  # type: ignore[arg-type]


NAME = "model.layers.0.mlp.up_proj.weight"
Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def _drop(part: str) -> Change:
    return lambda config, tensors: tensors.__delitem__(f"{NAME}.{part}")


def _put(part: str, value: Tensor) -> Change:
    name = f"{NAME}.{part}" if part else NAME
    return lambda config, tensors: tensors.update({name: value})


def _about(**values: Any) -> Change:
    return lambda config, tensors: config["quantization_config"].update(values)


def _floats(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in list(tensors):
        del tensors[name]
    tensors["model.norm.weight"] = torch.ones(32)


def _unannounced(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["quantization_config"]


BROKEN: dict[str, tuple[str, Change, type[EverystepError], str]] = {
    "no codes": ("int8", _drop("codes"), FormatError, "up_proj.weight' has no codes"),
    "no scales": ("int8", _drop("scales"), FormatError, "up_proj.weight' has no scales"),
    "floats too": ("int8", _put("", torch.ones(64, 32)), FormatError, "there twice"),
    "codes of a wrong type": (
        "int8",
        _put("codes", torch.zeros(64, 32, dtype=torch.uint8)),
        FormatError,
        "torch.int8",
    ),
    "codes of another format": (
        "int4",
        _put("codes", torch.zeros(64, 32, dtype=torch.int8)),
        FormatError,
        "torch.uint8",
    ),
    "codes too few": (
        "int8",
        _put("codes", torch.zeros(63, 32, dtype=torch.int8)),
        FormatError,
        r"\(64,\)",
    ),
    "codes of another model": (
        "int8",
        _put("codes", torch.zeros(64, 31, dtype=torch.int8)),
        FormatError,
        r"\(64, 31\)",
    ),
    "a vector of codes": (
        "int8",
        _put("codes", torch.zeros(64, dtype=torch.int8)),
        FormatError,
        "misshaped",
    ),
    "half a block": (
        "int4",
        _put("codes", torch.zeros(64, 8, dtype=torch.uint8)),
        FormatError,
        "whole blocks",
    ),
    "scales too few": ("int8", _put("scales", torch.ones(63)), FormatError, r"\(64,\).*\(63,\)"),
    "scales of a wrong type": (
        "int8",
        _put("scales", torch.ones(64).half()),
        FormatError,
        "torch.float32",
    ),
    "scales per row": ("int4", _put("scales", torch.ones(64).half()), FormatError, r"\(64, 1\)"),
    "minimums of int8": (
        "int8",
        _put("mins", torch.ones(64, 1).half()),
        FormatError,
        "no minimums",
    ),
    "minimums misshaped": ("int4", _put("mins", torch.ones(64).half()), FormatError, "mins"),
    "no weight at all": ("int8", _floats, FormatError, "has no codes"),
    "an unknown format": ("int8", _about(format="int3"), FormatError, "int8 or int4.*'int3'"),
    "the other format": ("int8", _about(format="int4"), FormatError, "torch.uint8"),
    "a later version": ("int8", _about(version=2), UnsupportedError, "version 2"),
    "another method": ("int8", _about(quant_method="gptq"), UnsupportedError, "'gptq'"),
    "not announced": ("int8", _unannounced, FormatError, r"\.codes"),
}


@pytest.mark.parametrize(("format", "change", "kind", "part"), BROKEN.values(), ids=BROKEN)
def test_broken_folders(
    source: Path, tmp_path: Path, format: Any, change: Change, kind: Any, part: str
) -> None:
    target = write_quantized(source, tmp_path / "target", format)
    config = json.loads((target / "config.json").read_text())
    tensors = load_file(target / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(kind, match=part):
        es.load(target)


def test_a_file_that_was_cut_off(source: Path, tmp_path: Path) -> None:
    target = write_quantized(source, tmp_path / "target", "int4")
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(FormatError, match="contradicts itself"):
        es.load(target)


def test_the_announcement_must_be_an_object(source: Path) -> None:
    config = {**CONFIG, **WIDE, "quantization_config": "int8"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="should be an object"):
        es.load(source)


OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MLX": ({"quantization": {"bits": 4, "group_size": 64}}, "quantised by MLX", "GGUF file"),
    "MLX, twice": (
        {"quantization_config": {"bits": 4, "group_size": 64, "mode": "affine"}},
        *("quantised by MLX", "quantize='int8'"),
    ),
    "compressed": (
        {"compression_config": {"quant_method": "compressed-tensors"}},
        *("quantised by compressed-tensors", "run_compressed=False"),
    ),
    "bits": ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes", "dequantize"),
    "unknown": ({"quantization_config": {"quant_method": "crumb"}}, "another program", "'crumb'"),
    "newer": (
        {"quantization_config": {"quant_method": "everystep", "version": 2}},
        *("quantised by everystep", "version 2"),
    ),
} | {
    one.value: ({"quantization_config": {"quant_method": one.value}}, "quantised by", "made from")
    for one in QuantizationMethod
}


@pytest.mark.parametrize("name", OTHERS)
def test_weights_that_others_quantised_are_refused_by_name(name: str) -> None:
    config, what, do = OTHERS[name]
    with pytest.raises(UnsupportedError, match=f"{what}.*{re.escape(do)}") as caught:
        folder_format(config)
    assert ("another program" in str(caught.value)) == (name == "unknown")
