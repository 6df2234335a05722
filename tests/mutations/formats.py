"""Every format that this library reads, as a whole input and what reads it."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import everystep as es
from everystep.files.gguf import read_gguf
from everystep.files.picture_files import read_picture
from everystep.files.safetensors import open_weights
from everystep.testing.models import tiny_llama
from everystep.testing.tokenizer import tiny_tokenizer
from everystep.text import Tokenizer
from tests.adapters.making import PROJECTIONS, random_lora, write_folder
from tests.cli.tiny_model import CONFIG, _tokenizer, write_tiny_model
from tests.files.gguf_writer import gguf_bytes
from tests.mutations.mutators import BYTES, JSON, Mutator

# How many of about a thousand inputs are of each format.
WEIGHTS = {
    "gguf": 400,
    "gguf model": 25,
    "safetensors": 410,
    "run": 20,
    "config.json": 40,
    "generation_config.json": 40,
    "tokenizer_config.json": 15,
    "special_tokens_map.json": 15,
    "tokenizer.json": 30,
    "model.safetensors.index.json": 15,
    "adapter_config.json": 5,
    "adapter_model.safetensors": 5,
    "wav": 60,
    "png": 20,
}


@dataclass(frozen=True)
class Format:
    """A whole input, how it is broken, where it lies, and what reads it there."""

    whole: bytes
    mutators: tuple[Mutator, ...]
    path: Path
    read: Callable[[], object]


def formats(folder: Path) -> dict[str, Format]:
    """All of them, each in a part of its own of an empty folder."""
    found = {"gguf": _gguf(folder / "gguf"), "safetensors": _safetensors(folder / "tensors")}
    found["gguf model"] = _whole_gguf(folder / "gguf-model")
    found["run"] = _run(folder / "run")
    found["wav"] = _wav(folder / "sounds")
    found["png"] = _png(folder / "pictures")
    found |= _of_model_folder(folder / "models")
    found |= _of_adapter(folder / "adapters")
    for one in found.values():
        one.path.write_bytes(one.whole)
    return found


def _gguf(folder: Path) -> Format:
    folder.mkdir()
    path = folder / "a.gguf"
    metadata = {"general.name": "whole", "list": [1, 2], "words": ["a", "bc"], "rate": 0.5}
    kinds = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
    tensors = {f"t{kind}": (kind, torch.ones(2, 256)) for kind in kinds}

    def read() -> None:
        file = read_gguf(path)
        for name in file.tensors:
            file.dequantise(name)

    return Format(gguf_bytes(metadata, tensors), BYTES, path, read)


def _whole_gguf(folder: Path) -> Format:
    """A model with its tokenizer."""
    folder.mkdir()
    path = folder / "a.gguf"
    width, hidden, layers = 32, 32, 2
    vocabulary = _tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": layers,
        "llama.context_length": 512,
        "llama.embedding_length": width,
        "llama.feed_forward_length": hidden,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3] * (len(tokens) - 256),
        "tokenizer.ggml.merges": ["t h", "th e"] if "the" in vocabulary else ["a b"],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    metadata["tokenizer.ggml.tokens"] = [*tokens, "ab"]
    metadata["tokenizer.ggml.token_type"].append(1)
    rows, random = len(tokens) + 1, torch.Generator().manual_seed(15)
    tensors = {"token_embd.weight": ("Q8_0", torch.randn(rows, width, generator=random))}
    tensors["output_norm.weight"] = ("F32", torch.ones(width))
    for layer in range(layers):
        shapes = {"attn_q": (width, width), "attn_k": (16, width), "attn_v": (16, width)}
        shapes |= {"attn_output": (width, width), "ffn_down": (width, hidden)}
        shapes |= {"ffn_gate": (hidden, width), "ffn_up": (hidden, width)}
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = ("Q8_0", torch.randn(shape, generator=random))
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = ("F32", torch.ones(width))
    return Format(gguf_bytes(metadata, tensors), BYTES, path, partial(_whole, path))


def _safetensors(folder: Path) -> Format:
    folder.mkdir()
    path = folder / "model.safetensors"
    types = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
    tensors = {f"a.{number}": torch.ones(3, 5).to(one) for number, one in enumerate(types)}
    save_file(tensors, path, {"format": "pt"})

    def read() -> None:
        weights = open_weights(folder)
        for name in weights.names():
            weights.load(name)

    return Format(path.read_bytes(), BYTES, path, read)


def _wav(folder: Path) -> Format:
    folder.mkdir()
    path = folder / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(bytes(range(256)))
    return Format(path.read_bytes(), BYTES, path, partial(es.read_sound, path))


def _png(folder: Path) -> Format:
    folder.mkdir()
    path = folder / "a.png"
    Image.linear_gradient("L").resize((16, 8)).save(path)
    return Format(path.read_bytes(), BYTES, path, partial(read_picture, path))


def _of_model_folder(parent: Path) -> dict[str, Format]:
    parent.mkdir()
    whole = write_tiny_model(parent / "whole")
    generation = {"do_sample": True, "temperature": 0.7, "top_k": 5, "eos_token_id": [256, 257]}
    generation |= {"max_new_tokens": 3, "repetition_penalty": 1.1, "sequence_bias": [[[5], 1.0]]}
    generation |= {"bad_words_ids": [[7, 8]], "suppress_tokens": [9], "num_beams": 1}
    special = {"eos_token": {"content": "<|end|>"}, "additional_special_tokens": ["<|user|>"]}
    weights = load_file(whole / "model.safetensors")
    names, split = sorted(weights), len(weights) // 2
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    parts = {first: names[:split], second: names[split:]}
    index = {
        "metadata": {"total_size": sum(one.nbytes for one in weights.values())},
        "weight_map": {name: part for part, those in parts.items() for name in those},
    }
    files = {
        "config.json": {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "generation_config.json": generation,
        "tokenizer_config.json": None,
        "special_tokens_map.json": special,
        "tokenizer.json": None,
        "model.safetensors.index.json": index,
    }
    found = {}
    for name, value in files.items():
        own = shutil.copytree(whole, parent / name)
        if value is not None:
            (own / name).write_text(json.dumps(value))
        if name == "model.safetensors.index.json":
            (own / "model.safetensors").unlink()
            for part, those in parts.items():
                save_file({one: weights[one] for one in those}, own / part, {"format": "pt"})
        path = own / name
        read = partial(_split if "token" in name else _answer, own)
        found[name] = Format(path.read_bytes(), JSON, path, read)
    return found


def _answer(folder: Path) -> object:
    """Loads a model, and where that succeeds lets it say something."""
    model = es.load_model(folder, executor="torch")
    return model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, seed=0)


def _split(folder: Path) -> object:
    """Loads a tokenizer, and where that succeeds lets it split and join a text."""
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer.decode(tokenizer.encode("ab <|end|> \u00e4" * 9))


def _whole(path: Path) -> object:
    """Loads a model with its tokenizer, and where that succeeds lets it say something."""
    model, tokenizer = es.load(path, executor="torch")
    return es.generate(model, tokenizer, "ab", max_new_tokens=2, seed=0)


def _of_adapter(folder: Path) -> dict[str, Format]:
    model = tiny_llama(dtype=torch.float32)
    lora = {
        name: values.float()
        for name, values in random_lora(model.state_dict(), 4, PROJECTIONS[:2], 3).items()
    }
    found = {}
    for name, mutators in (("adapter_config.json", JSON), ("adapter_model.safetensors", BYTES)):
        own = write_folder(folder / name, lora)
        path = own / name

        def read(own: Path = own) -> None:
            try:
                model.load_adapter(own, "a")
                model.generate(torch.tensor([[5, 6]]), adapter_names="a", max_new_tokens=2)
            finally:
                if "a" in model.adapters:
                    model.delete_adapter("a")

        found[name] = Format(path.read_bytes(), mutators, path, read)
    return found


def _run(folder: Path) -> Format:
    folder.mkdir()
    path = folder / "run"
    tokenizer = tiny_tokenizer(320)
    model = tiny_llama(vocab_size=320, dtype=torch.float32)
    options: dict[str, Any] = {"do_sample": True, "seed": 4, "max_new_tokens": 9}
    run = es.open(model, tokenizer, "the tool was", eos_token_id=None, **options)
    for _ in range(4):
        next(run)
    run.save(path)
    return Format(
        path.read_bytes(), BYTES, path, lambda: es.resume(path, model, tokenizer).result()
    )
