"""Folders that `save_pretrained` writes: both libraries load them and compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

import everystep as es
from everystep.api import saving
from everystep.api.load import from_weights
from everystep.errors import FileError, RequestError, UnsupportedError
from everystep.models.families import MODULES
from everystep.testing.tokenizer import tiny_tokenizer
from tests.adapters.making import random_lora, write_folder
from tests.models.pictures import OWN, reference_of
from tests.models.tiny import (
    DECODERS,
    ENCODER_DECODERS,
    ids,
    reference_decoder,
    reference_mamba,
    reference_pair,
    sounds,
    with_norms,
)

MAKE: dict[str, Callable[..., Any]] = {
    **{kind: partial(reference_decoder, kind) for kind in DECODERS},
    **{kind: partial(reference_pair, kind) for kind in ENCODER_DECODERS},
    **{kind: partial(reference_of, kind) for kind in OWN},
    "mamba": reference_mamba,
}
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "gemma3, apart": ("gemma3_text", {"tie_word_embeddings": False}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "t5, apart": ("t5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "mamba of a size that expand does not say": ("mamba", {"intermediate_size": 48}),
    "mamba, apart": ("mamba", {"tie_word_embeddings": False}),
}
# Tables that transformers computes anew and leaves out.
COMPUTED = {"marian": {f"model.{one}.embed_positions.weight" for one in ("encoder", "decoder")}}
FIRST = torch.tensor([[3, 7, 5, 11], [2, 4, 4, 9]])  # what a decoder reads beside an encoder
CASES = {**{kind: (kind, {}) for kind in MAKE}, **FURTHER}


def logits(model: Any, read: torch.Tensor) -> torch.Tensor:
    given = {"decoder_input_ids": FIRST} if model.config.is_encoder_decoder else {}
    given["input_features" if read.is_floating_point() else "input_ids"] = read
    with torch.no_grad():
        return model(use_cache=False, **given).logits


def tiny(folder: Path, **config: Any) -> Any:
    """A Llama of transformers', saved by it in the folder."""
    reference = with_norms(reference_decoder("llama", torch.float32, **config))
    reference.save_pretrained(folder)
    return reference


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_family_is_tested() -> None:
    """But for one that transformers does not know (tests/models/test_layout.py), and the text parts
    of models that read pictures (tests/models/test_without_tower.py)."""
    texts = {kind for kind in MODULES if kind.removesuffix("_text") in OWN and kind not in OWN}
    assert {*MAKE} == {*MODULES} - {"doclayllm", *texts}


@pytest.mark.parametrize("name", CASES)
def test_transformers_loads_what_was_saved(name: str, tmp_path: Path) -> None:
    """Every weight bit for bit, under the same names, a tied head once; the settings too."""
    kind, config = CASES[name]
    reference = with_norms(MAKE[kind](torch.float32, **config))
    reference.generation_config.max_new_tokens = 7
    reference.save_pretrained(tmp_path / "theirs")
    model = es.load_model(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert names(tmp_path / "ours") == files
    theirs, ours = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "ours"))
    if kind not in OWN:  # these are written under the names of an older release
        assert theirs.keys() | COMPUTED.get(kind, set()) == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) for key in theirs)
    auto = AutoModelForSeq2SeqLM if model.is_encoder_decoder else AutoModelForCausalLM
    auto = AutoModelForSpeechSeq2Seq if kind == "whisper" else auto
    auto = AutoModelForImageTextToText if kind in OWN else auto
    before, again = (auto.from_pretrained(tmp_path / one).eval() for one in ("theirs", "ours"))
    loaded, held = again.state_dict(), before.state_dict()
    assert loaded.keys() == held.keys()
    assert all(torch.equal(loaded[key], held[key]) for key in held)
    assert again.generation_config.max_new_tokens == 7
    read = sounds(2) if kind == "whisper" else ids(2, 30)
    assert torch.equal(logits(again, read), logits(before, read))
    assert torch.equal(logits(es.load_model(tmp_path / "ours"), read), logits(model, read))


@pytest.mark.parametrize("executor", ["torch", "native"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_written_in_the_type_that_is_asked_for(
    dtype: torch.dtype, executor: Any, tmp_path: Path
) -> None:
    reference = tiny(tmp_path / "theirs")
    model = es.load_model(tmp_path / "theirs", executor=executor)
    model.save_pretrained(tmp_path / "ours", dtype=dtype)
    tensors, expected = load_file(tmp_path / "ours" / "model.safetensors"), reference.state_dict()
    assert all(torch.equal(one, expected[key].to(dtype)) for key, one in tensors.items())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == dtype


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    reference = tiny(tmp_path / "theirs")
    model = es.load_model(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours", max_shard_size="40KB")
    shards = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(shards) > 3
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    values = [sum(one.nbytes for one in load_file(shard).values()) for shard in shards]
    assert max(values) <= 40_000
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(values)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    read = ids(2, 9)
    assert torch.equal(logits(again, read), logits(reference, read))
    assert torch.equal(logits(es.load_model(tmp_path / "ours"), read), logits(model, read))


def test_a_head_that_was_stored_beside_the_table_is_written(tmp_path: Path) -> None:
    reference = tiny(tmp_path / "theirs", tie_word_embeddings=False)
    config = tmp_path / "theirs" / "config.json"
    tied = {**json.loads(config.read_text()), "tie_word_embeddings": True}
    config.write_text(json.dumps(tied))
    es.load_model(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert not again.config.tie_word_embeddings
    read = ids(2, 9)
    assert torch.equal(logits(again, read), logits(reference, read))


def test_a_model_of_weights_in_memory_and_one_that_learns(tmp_path: Path) -> None:
    reference = tiny(tmp_path / "theirs")
    model = from_weights(reference.config.to_dict(), reference.state_dict())
    model.requires_grad_()
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    expected = 2 * reference.get_input_embeddings().weight
    assert torch.equal(again.get_input_embeddings().weight, expected)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_weights_are_written_as_values_when_a_type_is_given(
    quantize: Any, tmp_path: Path
) -> None:
    tiny(tmp_path / "theirs", hidden_size=64, num_attention_heads=8, intermediate_size=96)
    model = es.load_model(tmp_path / "theirs", quantize=quantize)
    with pytest.raises(UnsupportedError, match=r"transformers reads.*dtype=torch\.float32"):
        model.save_pretrained(tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
    model.save_pretrained(tmp_path / "ours", dtype=torch.float32)
    tensors, expected = load_file(tmp_path / "ours" / "model.safetensors"), model.state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in tensors.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("executor", ["torch", "native"])
def test_adapters_are_merged_when_that_is_asked_for(executor: Any, tmp_path: Path) -> None:
    reference = tiny(tmp_path / "theirs")
    model = es.load_model(tmp_path / "theirs", executor=executor)
    projections = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    tensors = random_lora(reference.state_dict(), 1, projections)
    folder = write_folder(tmp_path / "lora", tensors, target_modules=list(projections))
    model.load_adapter(folder, "style")
    with pytest.raises(RequestError, match=r"'style' and no choice.*adapters=\[\.\.\.\]"):
        model.save_pretrained(tmp_path / "ours")
    with pytest.raises(RequestError, match="no such adapter"):
        model.save_pretrained(tmp_path / "ours", adapters=["other"])
    assert not (tmp_path / "ours").exists()
    model.save_pretrained(tmp_path / "without", adapters=())
    model.save_pretrained(tmp_path / "once", adapters=["style"])
    model.save_pretrained(tmp_path / "half", adapters=[("style", 0.5)])
    read = ids(2, 9)
    without, once, half = (
        AutoModelForCausalLM.from_pretrained(tmp_path / one).eval()
        for one in ("without", "once", "half")
    )
    assert torch.equal(logits(without, read), logits(reference, read))
    key = "model.layers.1.mlp.up_proj.weight"
    plain = reference.state_dict()[key].clone()
    both = PeftModel.from_pretrained(reference, folder).merge_and_unload()
    torch.testing.assert_close(logits(once, read), logits(both, read))
    change = half.state_dict()[key] - plain
    torch.testing.assert_close(2 * change, both.state_dict()[key] - plain)


def test_other_files_of_a_folder_stay(tmp_path: Path) -> None:
    """Shards of a model that was there go, so that no loader finds two models."""
    reference = tiny(tmp_path / "theirs")
    model, folder = es.load_model(tmp_path / "theirs"), tmp_path / "ours"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    model.save_pretrained(folder, max_shard_size="40KB")
    assert (folder / "model.safetensors.index.json").exists()
    model.save_pretrained(folder)
    assert [path.name for path in folder.glob("model*")] == ["model.safetensors"]
    assert (folder / "notes.txt").read_text() == "mine"
    loaded, tokenizer = es.load(folder)
    assert len(tokenizer) == len(tiny_tokenizer())
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    read = ids(2, 9)
    assert torch.equal(logits(again, read), logits(reference, read))
    assert torch.equal(logits(loaded, read), logits(model, read))


def test_a_model_may_be_saved_where_it_came_from(tmp_path: Path) -> None:
    reference = tiny(tmp_path)
    es.load_model(tmp_path).save_pretrained(tmp_path)
    read = ids(2, 9)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, read), logits(reference, read))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_leaves_the_folder_as_it_was(
    error: BaseException, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny(tmp_path / "theirs")
    model, folder = es.load_model(tmp_path / "theirs"), tmp_path / "ours"
    if there:
        tiny(folder, num_hidden_layers=1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if there else {}

    def interrupted(*given: Any) -> None:
        write = saving.named_weights
        monkeypatch.setattr(saving, "named_weights", write)
        raise error

    monkeypatch.setattr(saving, "_converted", interrupted)
    with pytest.raises(type(error)):
        model.save_pretrained(folder)
    assert names(tmp_path) == (["ours", "theirs"] if there else ["theirs"])
    if there:
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a type of integers": ({"dtype": torch.int8}, RequestError, "cannot be written in this type"),
    "a type by name": ({"dtype": "float32"}, RequestError, "cannot be written in this type"),
    "no size": ({"max_shard_size": "large"}, RequestError, "max_shard_size is no size"),
    "a size of nothing": ({"max_shard_size": 0}, RequestError, "max_shard_size is no size"),
    "a size in no unit": ({"max_shard_size": "5XB"}, RequestError, "KB, MB, GB, KiB, MiB, GiB"),
    "an unknown argument": ({"push_to_hub": True}, TypeError, "push_to_hub"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_choices(name: str, tmp_path: Path) -> None:
    given, kind, text = WRONG[name]
    tiny(tmp_path / "theirs")
    with pytest.raises(kind, match=text):
        es.load_model(tmp_path / "theirs").save_pretrained(tmp_path / "ours", **given)
    assert not (tmp_path / "ours").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    tiny(tmp_path / "theirs")
    (tmp_path / "ours").write_text("a file")
    with pytest.raises(FileError, match="is a file; wanted a folder"):
        es.load_model(tmp_path / "theirs").save_pretrained(tmp_path / "ours")
    assert (tmp_path / "ours").read_text() == "a file"


def test_what_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32)
    weights = {name: 1e6 * one for name, one in reference.state_dict().items()}
    model = from_weights(reference.config.to_dict(), weights)
    with pytest.raises(RequestError, match="values that float16 cannot hold"):
        model.save_pretrained(tmp_path / "ours", dtype=torch.float16)
    assert not (tmp_path / "ours").exists()


def test_a_configuration_that_is_no_json(tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32)
    config = {**reference.config.to_dict(), "mine": {1, 2}}
    with pytest.raises(RequestError, match="what JSON cannot"):
        from_weights(config, reference.state_dict()).save_pretrained(tmp_path / "ours")


def test_a_wrapped_model_saves_itself(tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32)
    es.wrap(reference).save_pretrained(tmp_path / "ours", max_shard_size="1GB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    read = ids(2, 9)
    assert torch.equal(logits(again, read), logits(reference, read))


def test_a_tokenizer_goes_with_it(tmp_path: Path) -> None:
    tiny(tmp_path / "theirs", vocab_size=len(tiny_tokenizer()))
    tiny_tokenizer().save_pretrained(tmp_path / "theirs")
    model, tokenizer = es.load(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "ours")
    again = es.load(tmp_path / "ours")
    asked = {"max_new_tokens": 8, "do_sample": False}
    assert es.generate(*again, ["the cat"], **asked) == es.generate(
        model, tokenizer, ["the cat"], **asked
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs("the cat")["input_ids"] == tokenizer("the cat")["input_ids"]
    assert transformers.AutoConfig.from_pretrained(tmp_path / "ours").model_type == "llama"
