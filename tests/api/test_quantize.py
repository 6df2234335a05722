"""`es.quantize` to a GGUF file, from a folder and from another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import EverystepError, FileError, RequestError, UnsupportedError
from everystep.files.gguf import read_gguf
from everystep.models import named_weights
from everystep.testing.tokenizer import tiny_tokenizer
from tests.models.tiny import reference_decoder

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
FORMATS = ("q8_0", "q6_k", "q5_k_m", "q4_k_m")
LOSS = {"q8_0": 0.01, "q6_k": 0.02, "q5_k_m": 0.04, "q4_k_m": 0.08}
TEXT = "the cat sat on the mat and looked at the other cat, which sat there, too. " * 4


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of floats and a tokenizer."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    reference_decoder("llama", torch.float32, **WIDE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_holds_the_model_and_its_tokenizer(
    source: Path, tmp_path: Path, format: Any
) -> None:
    made = es.quantize(source, tmp_path / "model.gguf", format)
    floats, tokenizer = es.load(source)
    found, again = es.load(made)
    exact = dict(named_weights(es.load_model(made, dtype=torch.float32).core))  # type: ignore[arg-type]
    for name, wanted in named_weights(floats.core):  # type: ignore[arg-type]
        far = (exact[name] - wanted).norm() / wanted.norm()
        assert far < LOSS[format], name
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf"]
    assert read_gguf(made).metadata["general.file_type"] in (7, 18, 17, 15)
    prompt = again.encode(TEXT[:40])
    rows = found.generate(torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4)
    assert rows.shape == (1, len(prompt) + 4)


def test_a_file_of_floats_is_a_source_too(source: Path, tmp_path: Path) -> None:
    """Written from a folder or from a file of the same floats: the same tensors."""
    from everystep.files.gguf_writer import BLOCKS, GgufEntry, write_gguf
    from everystep.models.gguf_export import gguf_metadata, gguf_tensors
    from everystep.text.gguf_export import tokenizer_metadata

    model, tokenizer = es.load(source)
    core: Any = model.core
    tensors = [(name, one.float().contiguous()) for _, name, one in gguf_tensors(core)]
    entries = [GgufEntry(name, tuple(one.shape), BLOCKS["F32"]) for name, one in tensors]
    metadata = {**gguf_metadata(core, "x"), **tokenizer_metadata(tokenizer, core.vocab_size)}
    floats = tmp_path / "floats.gguf"
    with floats.open("wb") as file:
        write_gguf(file, metadata, entries, (one.view(torch.uint8) for _, one in tensors))
    first = read_gguf(es.quantize(source, tmp_path / "a.gguf", "q4_k_m"))
    second = read_gguf(es.quantize(floats, tmp_path / "b.gguf", "q4_k_m"))
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        assert torch.equal(first.blocks(name), second.blocks(name))


def test_importance_changes_what_is_lost(source: Path, tmp_path: Path) -> None:
    plain = read_gguf(es.quantize(source, tmp_path / "plain.gguf", "q4_k_m"))
    weighed = read_gguf(es.quantize(source, tmp_path / "weighed.gguf", "q4_k_m", importance=TEXT))
    name = "blk.0.ffn_down.weight"
    assert not torch.equal(plain.blocks(name), weighed.blocks(name))
    # Nothing is multiplied by a table of embeddings that is no head.
    assert torch.equal(plain.blocks("token_embd.weight"), weighed.blocks("token_embd.weight"))


WRONG: dict[str, tuple[str, dict[str, Any], type[EverystepError], str]] = {
    "no format": ("x.gguf", {"format": "q3_k"}, RequestError, "no such format"),
    "a folder's format": ("x.gguf", {"format": "int8"}, RequestError, "does not fit"),
    "a file's format": ("x", {"format": "q4_k_m"}, RequestError, "does not fit"),
    "text for a folder": ("x", {"format": "int4", "importance": "a"}, RequestError, "importance"),
    "no text": ("x.gguf", {"format": "q8_0", "importance": 5}, RequestError, "importance"),
    "an empty text": ("x.gguf", {"format": "q8_0", "importance": ""}, RequestError, "empty"),
    "there already": ("there.gguf", {"format": "q8_0"}, FileError, "there already"),
    "target is a number": (5, {"format": "q8_0"}, RequestError, "path"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_choices(source: Path, tmp_path: Path, name: str) -> None:
    target, options, kind, part = WRONG[name]
    (tmp_path / "there.gguf").write_bytes(b"")
    with pytest.raises(kind, match=part):
        es.quantize(source, tmp_path / target if isinstance(target, str) else target, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]


def test_what_is_rounded_is_not_rounded_again(source: Path, tmp_path: Path) -> None:
    es.quantize(source, tmp_path / "codes.gguf", "q8_0")
    with pytest.raises(RequestError, match="rounded before"):
        es.quantize(tmp_path / "codes.gguf", tmp_path / "again.gguf", "q4_k_m")


def test_a_family_without_a_name_in_files(tmp_path: Path) -> None:
    reference_decoder("gpt2", torch.float32).save_pretrained(tmp_path / "source")
    tiny_tokenizer().save_pretrained(tmp_path / "source")
    with pytest.raises(UnsupportedError, match="not written as GGUF"):
        es.quantize(tmp_path / "source", tmp_path / "x.gguf", "q8_0")


def test_nothing_is_left_of_a_file_that_failed(source: Path, tmp_path: Path) -> None:
    """A weight that is no number is met when its turn comes."""
    broken = tmp_path / "broken"
    model = es.load_model(source)
    model.requires_grad_()
    with torch.no_grad():
        dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight"][3, 5] = torch.nan
    model.save_pretrained(broken)
    tiny_tokenizer().save_pretrained(broken)
    with pytest.raises(UnsupportedError, match="float16"):
        es.quantize(broken, tmp_path / "x.gguf", "q4_k_m")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]
