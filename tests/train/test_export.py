"""What was trained as a whole model: a folder for transformers, a file for llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import everystep as es
from everystep.errors import FileError, RequestError, UnsupportedError
from everystep.files.gguf import read_gguf
from everystep.testing.tokenizer import tiny_tokenizer
from tests.api.test_quantize import WIDE
from tests.models.tiny import farthest, reference_decoder

READ = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(3))
DATA = [{"prompt": "one", "completion": " two"}, {"prompt": "three", "completion": " four"}]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    reference_decoder("llama", torch.float32, **WIDE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def trained(model: Any, tokenizer: Any, folder: Path, *, lora: bool) -> es.Trainer:
    args = es.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        learning_rate=0.05 if lora else 0.005,
        save_strategy="no",
        disable_tqdm=True,
    )
    config = es.LoraConfig(r=4, target_modules="all-linear") if lora else None
    run = es.Trainer(model, args, None, DATA, None, tokenizer, peft_config=config)
    run.train()
    return run


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far values are apart on average, since the farthest of few says little."""
    return float((one - other).abs().mean())


@pytest.mark.parametrize("lora", [True, False])
def test_it_answers_as_what_was_trained(source: Path, tmp_path: Path, lora: bool) -> None:
    model, tokenizer = es.load(source)
    untrained = model(READ).logits
    run = trained(model, tokenizer, tmp_path / "run", lora=lora)
    own = {"adapter_names": "default"} if lora else {}
    with torch.no_grad():
        wanted = run.model(READ, use_cache=False, **own).logits
    assert farthest(untrained, wanted) > 0.05
    folder = run.export(tmp_path / "merged")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert farthest(reference(READ).logits.detach(), wanted) < 1e-4
    assert es.load(folder)[1].encode("one two") == tokenizer.encode("one two")
    with torch.no_grad():
        again = run.model(READ, use_cache=False, **own).logits
    assert torch.equal(again, wanted)  # nothing was merged into the model itself
    file = run.export(tmp_path / "merged.Q8_0.gguf")
    assert read_gguf(file).metadata["general.file_type"] == 7
    found = es.load_model(file)(READ).logits
    assert apart(found, wanted) < 0.4 * apart(untrained, wanted)
    assert run.export(tmp_path / "plain.gguf", "q6_k").exists()
    with pytest.raises(FileError, match="is there already"):
        run.export(file)


def test_an_adapter_of_a_model_in_codes(source: Path, tmp_path: Path) -> None:
    """The codes are rounded a second time with the adapter in them."""
    coded = es.quantize(source, tmp_path / "base.gguf", "q8_0")
    model, tokenizer = es.load(coded)
    run = trained(model, tokenizer, tmp_path / "run", lora=True)
    wanted = run.model(READ, use_cache=False, adapter_names="default").logits.detach()
    found = es.load_model(run.export(tmp_path / "merged.gguf"))(READ).logits
    base = es.load_model(coded)(READ).logits
    assert apart(found, wanted) < 0.3 * apart(base, wanted)
    folder = run.export(tmp_path / "floats")
    assert set(es.load_model(folder).weight_bytes) == {"float32"}


def test_what_cannot_be_written_is_refused(source: Path, tmp_path: Path) -> None:
    model, tokenizer = es.load(source)
    run = trained(model, tokenizer, tmp_path / "run", lora=True)
    with pytest.raises(RequestError, match="dtype has no effect in a GGUF file"):
        run.export(tmp_path / "x.gguf", dtype=torch.float16)
    with pytest.raises(RequestError, match="format q8_0 is of a GGUF file"):
        run.export(tmp_path / "x", "q8_0")
    with pytest.raises(RequestError, match="which of them are written"):
        es.export_gguf(run.model, tokenizer, tmp_path / "x.gguf")
    with pytest.raises(RequestError, match="'default'"):
        es.export_gguf(run.model, tokenizer, tmp_path / "x.gguf", adapters=["other"])
    run.processing_class = None
    with pytest.raises(RequestError, match="a GGUF file holds a tokenizer"):
        run.export(tmp_path / "x.gguf")
    module = reference_decoder("llama", torch.float32, **WIDE)
    args = es.TrainingArguments(output_dir=tmp_path)
    wrapped = es.Trainer(module, args, None, DATA, None, tokenizer)
    with pytest.raises(UnsupportedError, match="own library"):
        wrapped.export(tmp_path / "x")
    with pytest.raises(UnsupportedError, match="own library"):
        es.export_gguf(wrapped.model, tokenizer, tmp_path / "x.gguf")
    assert not list(tmp_path.glob("x*"))
