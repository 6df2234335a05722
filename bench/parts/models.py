"""The default model in every form that an engine of the benchmarks reads.

All come from the shipped Q4_1 file: copies of it in other block types, its float32 values as a
folder of safetensors, and what the peers' own converters make of that folder. Each is made once,
whole or not at all. Knows files and converters, nothing about measuring.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from parts.environments import (
    PEERS,
    Unavailable,
    default_folder,
    python_of,
    quantise_gguf,
)
from parts.gguf_copy import write_copy
from safetensors.torch import save_file

import everystep
from everystep.files.sources import DEFAULT_MODEL, resolve_source

SHIPPED = "Q4_1"


@dataclass(frozen=True)
class Models:
    """Forms of the default model, kept in a folder; paths are made when they are asked for."""

    folder: Path

    @classmethod
    def default(cls) -> Models:
        """Kept with the peers' environments."""
        return cls(default_folder())

    def gguf(self, kind: str) -> Path:
        """The shipped file, or a copy of it in the blocks of `kind`."""
        shipped = resolve_source(DEFAULT_MODEL)
        if kind == SHIPPED:
            return shipped
        return self._made(f"{kind}.gguf", lambda target: write_copy(shipped, target, kind))

    def quantised(self, kind: str) -> Path:
        """A file that llama.cpp's quantiser made of the float32 values, such as Q4_K_M."""
        source = self.gguf("F32")
        return self._made(
            f"{kind}.gguf", lambda target: quantise_gguf(source, target, kind, self.folder)
        )

    def float32(self) -> Path:
        """A folder that transformers and this library read."""
        return self._made("float32", _write_float32)

    def bfloat16(self) -> Path:
        """The same in half of the bytes."""
        return self._made("bfloat16", _write_bfloat16)

    def onnx(self, kind: str) -> Path:
        """By the model builder of ONNX Runtime GenAI, fp32 or int4 in blocks of 32."""
        options = ["--extra_options", "int4_block_size=32", "int4_accuracy_level=4"]
        line = ["-m", "onnxruntime_genai.models.builder", "-e", "cpu", "-p", kind]
        line += ["-i", str(self.float32()), "-c", str(self.folder / "models" / "onnx-cache")]
        return self._converted(
            "onnxruntime-genai",
            f"onnx-{kind}",
            lambda target: [*line, "-o", str(target), *(options if kind == "int4" else [])],
        )

    def ctranslate2(self, kind: str) -> Path:
        """By CTranslate2's converter, float32 or int8 (a scale per output)."""
        line = ["-m", "ctranslate2.converters.transformers", "--model", str(self.float32())]
        return self._converted(
            "ctranslate2",
            f"ctranslate2-{kind}",
            lambda target: [*line, "--quantization", kind, "--output_dir", str(target)],
        )

    def _converted(self, peer: str, name: str, line: Callable[[Path], list[str]]) -> Path:
        python = str(python_of(PEERS[peer], self.folder))

        def convert(target: Path) -> None:
            done = subprocess.run([python, *line(target)], capture_output=True, text=True)
            if done.returncode:
                cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
                raise Unavailable(f"{peer} could not convert the model: {cause}")

        return self._made(name, convert)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        """`name` in the folder, made under another name first so that it is never half there."""
        target = self.folder / "models" / name
        if not target.exists():
            unfinished = target.with_name(f"unfinished-{name}")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.parent.mkdir(parents=True, exist_ok=True)
            make(unfinished)
            unfinished.rename(target)
        return target


@cache
def reference() -> Any:
    """A module of transformers with the default model's float32 values, without an end."""
    from transformers import LlamaForCausalLM

    made = LlamaForCausalLM.from_pretrained(Models.default().float32(), dtype=torch.float32).eval()
    made.generation_config.eos_token_id, made.generation_config.pad_token_id = None, 0
    return made


def _write_float32(folder: Path) -> None:
    folder.mkdir()
    model, tokenizer = everystep.load(DEFAULT_MODEL, dtype=torch.float32)
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def _write_bfloat16(folder: Path) -> None:
    model, tokenizer = everystep.load(DEFAULT_MODEL, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
